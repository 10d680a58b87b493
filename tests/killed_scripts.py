"""Jobs of a script under `geomx launch`, whose processes are killed at random."""

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from desk import Desk
from forked_launch import ForkedLaunch
from rehearsal import Rehearsal

LIMIT = 240.0
AT = Path(__file__).parent / "scripts" / "killed_at.py"


def killed_at(
    desk: Desk, kills: str, options: list[str], command: list[str], folder: Path, imported: str
) -> Path:
    """Run a job of `command`, a script's path and its arguments, in `folder`; workers are killed at the given reports,
    see scripts/killed_at.py, and go on. Returns the job's directory.

    imported: what its processes are forked from, see ForkedLaunch.
    """
    directory = desk.folder / "killed"
    words = ["--local", "--restarts", "100", "--job-dir", str(directory), "--json", *options]
    job = ForkedLaunch.begin(
        desk, *words, "--", "python", str(AT), kills, *command, imported=imported, folder=folder
    )
    assert job.finish() == 0 and json.loads(job.output)["status"] == "done", job.errors
    logs = "".join(path.read_text() for path in sorted(directory.glob("logs/*worker*.log")))
    assert logs.count("this worker goes on at") == len(kills.split(",")), logs
    return directory


def play(
    desk: Desk, name: str, options: list[str], command: list[str], imported: str, kills: str = "", count: int = 0
) -> list[str]:
    """Run the job in the desk's folder `name`; return what its workers' logs have behind FOUND, in their order.

    imported: what its processes are forked from, see ForkedLaunch.
    kills: patterns of the names of processes, separated by commas: in turn one of each is killed, `count` in all, once
    workers have reported steps.
    """
    where = [] if "--hosts" in options else ["--local"]
    words = [*where, "--job-dir", name, "--restarts", "100", *options, "--", *command]
    job, folder = ForkedLaunch.begin(desk, *words, imported=imported), desk.folder / name
    random, killed, deadline = Random(name), list[str](), time.monotonic() + LIMIT
    while job.returncode is None and time.monotonic() < deadline:
        time.sleep(random.uniform(0.1, 1.0))
        if len(killed) < count and _trains(folder):
            patterns = kills.split(",")
            killed += _kill(folder, patterns[len(killed) % len(patterns)], random)
    if job.returncode is None:
        job.process.send_signal(signal.SIGINT)
    assert job.finish(60) == 0, job.errors
    assert bool(killed) == bool(count), (killed, job.errors)  # a quick machine has done all before the last one
    return _found(folder)


def calm(desk: Desk, name: str, options: list[str], command: list[str], imported: str) -> list[str]:
    """As `play`, of a job in which no process dies: without agents."""
    where = [] if "--hosts" in options else ["--local"]
    Rehearsal(desk, *where, "--job-dir", name, *options, "--", *command, imported=imported).finish(LIMIT)
    return _found(desk.folder / name)


def _found(folder: Path) -> list[str]:
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
