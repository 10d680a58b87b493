"""Jobs of a script under `geomx launch`, whose processes are killed at random."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from desk import Desk

LIMIT = 240.0
AT = Path(__file__).parent / "scripts" / "killed_at.py"


def killed_at(desk: Desk, kills: str, options: list[str], command: list[str], folder: Path) -> Path:
    """Run a job of `command`, a script's path and its arguments, in `folder`; workers are killed at the given reports,
    see scripts/killed_at.py, and go on. Returns the job's directory.
    """
    directory = desk.folder / "killed"
    job = ["--local", "--restarts", "100", "--job-dir", str(directory), "--json", *options]
    done = desk.geomx("launch", *job, "--", "python", str(AT), kills, *command, cwd=folder)
    assert done.returncode == 0 and json.loads(done.stdout)["status"] == "done", done.stderr
    logs = "".join(path.read_text() for path in sorted(directory.glob("logs/*worker*.log")))
    assert logs.count("this worker goes on at") == len(kills.split(",")), logs
    return directory


def play(folder: Path, options: list[str], command: list[str], kills: str = "", count: int = 0) -> list[str]:
    """Run the job in `folder`, and return what its workers' logs have behind FOUND, in the order of their names.

    kills: a pattern of the names of processes of which `count` are killed, once workers have reported steps.
    """
    words = ["-m", "geomx_cli", "launch", "--local", "--job-dir", str(folder), "--restarts", "100", *options]
    launched = subprocess.Popen(
        [sys.executable, *words, "--", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    random, killed, deadline = Random(folder.name), list[str](), time.monotonic() + LIMIT
    while launched.poll() is None and time.monotonic() < deadline:
        time.sleep(random.uniform(0.1, 1.0))
        if len(killed) < count and _trains(folder):
            killed += _kill(folder, kills, random)
    if launched.poll() is None:
        launched.send_signal(signal.SIGINT)
    output = launched.communicate(timeout=60)[0]
    assert launched.returncode == 0, output
    assert bool(killed) == bool(count), (killed, output)  # a quick machine has done all before the last one
    logs = [path.read_text() for path in sorted(folder.glob("logs/*worker*.log"))]
    return [line for log in logs for line in log.splitlines() if line.startswith("FOUND")]


def _trains(folder: Path) -> bool:
    """Whether all workers have reported steps."""
    logs = list(folder.glob("events/*worker*.jsonl"))
    return bool(logs) and all('"reported"' in path.read_text() for path in logs)


def _kill(folder: Path, pattern: str, random: Random) -> list[str]:
    found: dict[str, int] = {}
    for path in folder.glob("hosts/*/agent-state.json"):
        with suppress(OSError, ValueError):
            found |= {name: pid for name, (pid, *_) in json.loads(path.read_text())["processes"].items()}
    running = sorted(name for name in found if re.search(pattern, name))
    if not running:
        return []
    name = random.choice(running)
    with suppress(ProcessLookupError):
        os.kill(found[name], signal.SIGKILL)
        return [name]
    return []
