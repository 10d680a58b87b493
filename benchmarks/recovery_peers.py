"""Kills a worker in geomx and in other systems, and compares what becomes of the training.

    .venv-torch/bin/python benchmarks/recovery_peers.py                        all systems
    .venv-torch/bin/python benchmarks/recovery_peers.py --system geomx-fsa torchft-diloco --kills 1
    .venv-torch/bin/python benchmarks/recovery_peers.py --json                 one object

Two workers on this machine train the same small network (recovery_task.py) on the same data. The second one gets
SIGKILL at equal distances. Each system runs as its documentation says, with the restarts that it has, or else in a loop
of the shell (recovery_peers_systems.py, recovery_peer_*.py); and once more without kills. One that cannot be installed
is left out, and the reason printed. Of each system:

    still     longest time without a step of the other worker, after each kill; seconds
    back      from each kill to the next step of the killed worker; seconds
    lost      steps without kills whose samples the final model does not have
    again     steps whose samples are trained more often than without kills
    rate      whether the killed worker continues with the learning rate of the other, within a round
    data      whether it continues with the batch after its last one, or with that which its model is to see next
    weights   "same bits" as without kills, or the largest difference
    lines     that the user writes to survive kills
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from outcome import conclude
from peers_environment import interpreter
from recovery_peers_systems import FOLDER, SYSTEMS, Member, Setting, System
from recovery_task import BATCH, DECAY, RATE, ROUND, WORKERS

from geomx_cli.core.errors import CheckFailed

KILLED, OTHER = 1, 0
STARTING, STUCK, ENDING = 120.0, 60.0, 15.0
"""Seconds without a step: from the start, and later, until a system hangs; and for its processes to end."""


@dataclass
class Step:
    """One that a worker has logged. life: which of its lives. kept: all workers' model has it."""

    time: float
    number: int
    rate: float
    samples: tuple[int, ...]
    life: int
    kept: bool = False

    @property
    def scheduled(self) -> int:
        """The step that the learning rate belongs to."""
        return round(math.log(self.rate / RATE) / math.log(DECAY))


@dataclass
class Log:
    """What a worker has logged so far."""

    path: Path
    pids: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    _read: int = 0

    def update(self) -> None:
        """Read what is new."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            self._add(json.loads(line))

    def _add(self, found: dict[str, Any]) -> None:
        life = len(self.pids) - 1
        if "pid" in found:
            self.pids.append(found["pid"])
        elif "kept" in found:
            for step in self.steps:
                step.kept = step.kept or step.life == life
        else:
            self.steps.append(Step(found["time"], found["step"], found["rate"], tuple(found["samples"]), life))

    @property
    def trains(self) -> bool:
        """The present life has taken a step."""
        return bool(self.steps) and self.steps[-1].life == len(self.pids) - 1


@dataclass
class Outcome:
    """A run's end. ended: "" if it went to its end. kills: their times, and the life that ended."""

    ended: str
    logs: list[Log]
    kills: list[tuple[float, int]]
    weights: Any
    errors: str


def play(system: System, folder: Path, kills: int, arguments: argparse.Namespace) -> Outcome:
    """Run a system once."""
    folder.mkdir()
    last = (str(folder), str(arguments.steps), str(arguments.pause))
    members = system.members(Setting(interpreter(system.environment), folder, last))
    running = [(member, _start(member, folder, number)) for number, member in enumerate(members)]
    logs = [Log(folder / f"worker{rank}.jsonl") for rank in range(WORKERS)]
    due = [arguments.steps * (number + 1) // (kills + 1) for number in range(kills)]
    done: list[tuple[float, int]] = []
    ended, since, count = "", time.monotonic() + STARTING - STUCK, 0
    try:
        while not ended and any(popen.poll() is None for member, popen in running if not member.lasts):
            time.sleep(0.02)
            for log in logs:
                log.update()
            steps = sum(len(log.steps) for log in logs)
            if steps > count:
                since, count = max(since, time.monotonic()), steps
            failed = [popen.returncode for _, popen in running if popen.poll()]
            ended = f"ends with status {failed[0]}" if failed else "hangs" if time.monotonic() > since + STUCK else ""
            newest = max((log.steps[-1].number for log in logs if log.steps), default=0)
            if len(done) < kills and newest >= due[len(done)] and logs[KILLED].trains:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(logs[KILLED].pids[-1], signal.SIGKILL)
                    done.append((time.time(), len(logs[KILLED].pids) - 1))
    finally:
        _stop([popen for _, popen in running])
    for log in logs:
        log.update()
    errors = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(folder.glob("errors*")))
    file = folder / f"weights{OTHER}.npy"
    return Outcome(ended, logs, done, np.load(file) if file.exists() else None, errors)


def _start(member: Member, folder: Path, number: int) -> "subprocess.Popen[bytes]":
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
    env = clean | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"} | member.env
    with (folder / f"errors{number}").open("w") as log:
        return subprocess.Popen(
            member.argv, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _stop(running: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Interrupt the processes, and kill what is left."""
    end = time.monotonic() + ENDING
    children = [child for popen in running for child in _children(popen.pid)]  # torchrun's have sessions of their own
    for popen in running:
        popen.send_signal(signal.SIGINT)
    for popen in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            popen.wait(max(0.1, end - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def compare(system: System, calm: Outcome, found: Outcome) -> dict[str, Any]:
    """The row of a system."""
    bounds = [when for when, _ in found.kills] + [math.inf]
    after = [_after_kill(found.logs, calm.logs[KILLED], when, life, until)
             for (when, life), until in zip(found.kills, bounds[1:], strict=True)]  # fmt: skip
    usual, had = _counted(system, calm.logs), _counted(system, found.logs)
    trained, calmly = _trained(found.logs), _trained(calm.logs)
    row = {
        "title": system.title, "goes_on": found.ended or "yes", "kills": len(found.kills), "after_kills": after,
        "still_without_kills": _still(calm.logs[OTHER], 0.0, math.inf), "lines": _lines(system),
    }  # fmt: skip
    if found.ended:
        return row
    row |= {"lost": (usual - had).total() / BATCH, "again": (trained - calmly).total() / BATCH, "difference": None}
    if found.weights is not None and calm.weights is not None:
        same = found.weights.tobytes() == calm.weights.tobytes()
        row["difference"] = 0.0 if same else float(np.abs(found.weights - calm.weights).max())
    return row


def _after_kill(logs: Sequence[Log], calm: Log, when: float, life: int, until: float) -> dict[str, Any]:
    """What a kill did to the other worker and to the killed one, which may not have come back."""
    row: dict[str, Any] = {"still": _still(logs[OTHER], when, until), "back": None, "rate": None, "data": None}
    before = [step for step in logs[KILLED].steps if step.life <= life]
    back = [step for step in logs[KILLED].steps if step.life > life]
    if back:
        first = back[0]
        near = [step.scheduled for step in logs[OTHER].steps if abs(step.time - first.time) < 2.0]
        places = {step.samples: place for place, step in enumerate(calm.steps)}
        place, last = places.get(first.samples), places.get(before[-1].samples)
        row |= {
            "back": first.time - when, "rate": any(abs(first.scheduled - each) <= ROUND for each in near),
            "data": place is not None and last is not None and place in (last + 1, first.scheduled),
            "place": place, "last_place": last, "scheduled": first.scheduled,
        }  # fmt: skip
    return row


def _still(log: Log, begin: float, end: float) -> float | None:
    """The longest time between two steps that overlaps with a span; None if there is no step after its begin."""
    gaps = [after.time - before.time for before, after in pairwise(log.steps)
            if after.time > begin and before.time < end]  # fmt: skip
    return max(gaps, default=None)


def _counted(system: System, logs: Sequence[Log]) -> Counter[int]:
    """How often the model has each sample."""
    found = Counter[int]()
    for log in logs:
        kept = {step.number: step for step in log.steps}.values() if system.numbered else log.steps
        for step in kept:
            if system.numbered or step.kept:
                found.update(step.samples)
    return found


def _trained(logs: Sequence[Log]) -> Counter[int]:
    return Counter(index for log in logs for step in log.steps for index in step.samples)


def _lines(system: System) -> int:
    """Lines of the script between the marks, without those that are for this benchmark only, and those elsewhere."""
    count, counts = len(system.further), False
    text = (FOLDER / f"recovery_peer_{system.script}.py").read_text() if system.script else ""
    for line in text.splitlines():
        if line.strip() in ("# recovery: begin", "# recovery: end"):
            counts = line.endswith("begin")
        else:
            count += bool(line.strip()) and (counts or "# recovery" in line)
    return count


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run a system without and with kills. Raises CheckFailed if it fails without."""
    system = SYSTEMS[name]
    with tempfile.TemporaryDirectory(prefix="gxr") as base:
        calm = play(system, Path(base, "calm"), 0, arguments)
        if calm.ended:
            raise CheckFailed(f"without kills it {calm.ended}", calm.errors)
        found = play(system, Path(base, "kills"), arguments.kills, arguments)
        if arguments.verbose:
            print(found.errors, file=sys.stderr)
        return {"name": name} | compare(system, calm, found)


def _line(row: dict[str, Any]) -> str:
    def each(name: str) -> str:
        values = [after[name] for after in row["after_kills"]]
        return "/".join("-" if value is None else f"{value:.1f}" for value in values)

    def all_of(name: str) -> str:
        values = [after[name] for after in row["after_kills"] if after[name] is not None]
        return "-" if not values else "yes" if all(values) else "no"

    parts = [f"{row['title']}: {row['goes_on']}", f"still {each('still')} s", f"back {each('back')} s"]
    if "lost" in row:
        off = row["difference"]
        parts += [f"lost {row['lost']:g}", f"again {row['again']:g}"]
        parts += [f"{name} {all_of(name)}" for name in ("rate", "data")]
        parts += ["no weights" if off is None else f"off by {off:.2g}" if off else "same bits"]
    return ", ".join([*parts, f"{row['lines']} lines"])


def main() -> int:
    """Compare the systems; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME",
                        help=f"of {', '.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="of each worker, a multiple of 200")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that each step sleeps")
    parser.add_argument("--verbose", action="store_true", help="print what the processes with kills print")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def run() -> list[dict[str, Any]]:
        rows = []
        for name in arguments.system:
            try:
                rows.append(measure(name, arguments))
                print(_line(rows[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
            except CheckFailed as error:
                print(f"{SYSTEMS[name].title}: left out: {error}", file=sys.stderr, flush=True)
        return rows

    return conclude(run, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
