"""Kills processes of jobs at random, and compares each job's result with that of the same job undisturbed.

    python benchmarks/recovery.py --kills 200 --seed 1      jobs of all kinds in turn, until so many were killed
    python benchmarks/recovery.py --kills 10 --only fsa     of the jobs whose name contains a text
    python benchmarks/recovery.py --kills 50 --json         one object

A job has two parties of two workers on this machine, and trains `linear` on Fashion-MNIST. Which process is killed,
when and how is drawn from the seed:

    kill   SIGKILL
    stop   SIGSTOP, and SIGKILL one to five seconds later
    two    SIGKILL to two processes at once
    again  SIGKILL, and once more as soon as the process is back
    agent  SIGKILL to an agent, with which its processes end
    host   SIGKILL to all processes of a host at once, its agent and the keeper of that included

A job passes if all workers end with the weights of the undisturbed job, to the bit. The weights of `mixed` and `esync`
depend on timing, and differ between undisturbed jobs too. These pass if all workers end with the same weights, and, in
`mixed`, have trained on as many samples as in the undisturbed job. "Without training" is the time from a kill to the
next round that ends, less the longest time between two rounds of the undisturbed job.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

__all__ = ["JOBS", "Disturbed", "Killing", "Outcome", "differs", "main", "run"]

_ALGORITHMS = {
    "fsa": "--algo fsa", "hfa": "--algo hfa --k1 5 --k2 3", "diloco": "--algo diloco --inner-steps 10",
    "mixed": "--algo mixed", "esync": "--algo esync",
}  # fmt: skip
# Most pairs of an algorithm, a codec and a topology are in some row.
_ROWS = [
    ("fsa", "", "spread"), ("fsa", "fp16", "central"), ("fsa", "bsc:0.02", "spread"), ("fsa", "int8", "flat"),
    ("fsa", "bsc:0.02", "flat"), ("fsa", "", "central"), ("hfa", "", "central"), ("hfa", "fp16", "spread"),
    ("hfa", "int8", "central"), ("hfa", "sparseloco:0.05", "spread"), ("diloco", "", "flat"),
    ("diloco", "fp16", "flat"),
    ("diloco", "int8", "spread"), ("diloco", "sparseloco:0.05", "central"), ("mixed", "", "spread"),
    ("mixed", "fp16", "central"), ("esync", "", "central"),
]  # fmt: skip
_KINDS = ("kill", "kill", "stop", "two", "again", "agent", "host")
_WHOLE = ("agent", "host")
_TIMED = ("mixed", "esync")
_LIMIT = 180.0  # seconds for a job
Start = Callable[[Sequence[str]], "subprocess.Popen[str]"]


def _options(row: Sequence[str]) -> list[str]:
    algorithm, codec, topology = row
    codec_option = ["--compress", codec] if codec else []
    return [*_ALGORITHMS[algorithm].split(), *codec_option, "--topology", topology]


JOBS = {" ".join(filter(None, row)): _options(row) for row in _ROWS} | {
    "fsa p3 spread": ["--p3"], "fsa dgt central": ["--dgt", "2", "--topology", "central"],
    "fsa tsengine central": ["--tsengine", "both", "--topology", "central"],
}  # fmt: skip
"""Options of launch by name of the job."""


@dataclass(frozen=True)
class Killing:
    """when: in Unix seconds. process: its name. kind: see above."""

    when: float
    process: str
    kind: str


@dataclass
class Outcome:
    """A job's end.

    status: of launch.
    weights: digest of each worker's.
    samples: that each worker has trained on.
    rounds: when workers' rounds ended, in Unix seconds.
    """

    status: int
    weights: dict[str, str]
    samples: dict[str, int]
    rounds: list[float]
    kills: list[Killing] = field(default_factory=list)
    output: str = ""


def _start(arguments: Sequence[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "geomx_cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@dataclass
class Disturbed:
    """A running job, whose processes are killed.

    gaps: the shortest and the longest time between two kills, in seconds.
    start: starts `geomx` with these arguments; its output and errors come through one pipe.
    """

    folder: Path
    options: Sequence[str]
    roles: str
    random: Random
    gaps: tuple[float, float] = (0.2, 1.2)
    start: Start = field(default=_start)

    def play(self, kills: int) -> Outcome:
        """Run the job to its end; `kills` of its processes die on the way, if it takes as long."""
        job = ["--job-dir", str(self.folder), "--restarts", "100", *self._job()]
        launched = self.start(["launch", *job])
        done: list[Killing] = []
        deadline = time.monotonic() + _LIMIT
        while launched.poll() is None and time.monotonic() < deadline:
            time.sleep(self.random.uniform(*self.gaps))
            if len(done) < kills and self._has_begun():
                done += self._kill()
        if launched.poll() is None:
            launched.send_signal(signal.SIGINT)
        output = launched.communicate(timeout=60)[0]
        return self._outcome(launched.returncode, done, output)

    def _job(self) -> list[str]:
        """What the job trains, and how."""
        return ["--network", "linear", "--epochs", "2", *self.options]

    def _has_begun(self) -> bool:
        return any(self.folder.glob("events/*worker*.jsonl"))

    def _kill(self) -> list[Killing]:
        kinds = _KINDS if re.search(self.roles, "agent") else _KINDS[: -len(_WHOLE)]
        kind = self.random.choice(_WHOLE if self.roles == "agent" else kinds)
        if kind in _WHOLE:
            return self._kill_agent(kind)
        first = self._choose(2 if kind == "two" else 1)
        if not first:
            return []
        now = time.time()
        if kind == "stop":
            _signal(first.values(), signal.SIGSTOP)
            time.sleep(self.random.uniform(1, 5))
            now = time.time()
        _signal(first.values(), signal.SIGKILL)
        done = [Killing(now, name, kind) for name in first]
        if kind == "again":
            (name,) = first
            limit = time.monotonic() + 5
            while (pid := self._processes().get(name, first[name])) == first[name] and time.monotonic() < limit:
                time.sleep(0.02)
            if pid != first[name]:
                time.sleep(self.random.uniform(0, 0.5))
                done.append(Killing(time.time(), name, kind))
                _signal([pid], signal.SIGKILL)
        return done

    def _kill_agent(self, kind: str) -> list[Killing]:
        """Kill an agent, alone or with all processes of its host."""
        host, state = self.random.choice(sorted(self._states().items()) or [("", None)])
        if state is None or not _runs(state["agent"][0]):
            return []
        pids = [state["agent"][0]]
        if kind == "host":
            _, *guards = json.loads((self.folder / "hosts" / host / "agent.lock").read_text())
            pids = [pid for pid, *_ in (*guards, *state["processes"].values())]
        now = time.time()
        _signal(filter(_runs, pids), signal.SIGKILL)
        return [Killing(now, f"{host}/{kind}", kind)]

    def _choose(self, count: int) -> dict[str, int]:
        running = {name: pid for name, pid in self._processes().items() if re.search(self.roles, name)}
        chosen = self.random.sample(sorted(running), min(count, len(running)))
        return {name: running[name] for name in chosen}

    def _processes(self) -> dict[str, int]:
        """The pids of the job's processes by name, of their present lives, as the agents have written them."""
        found: dict[str, int] = {}
        for state in self._states().values():
            found |= {name: pid for name, (pid, *_) in state["processes"].items() if _runs(pid)}
        return found

    def _states(self) -> dict[str, Any]:
        """What the agents have written, by host."""
        found: dict[str, Any] = {}
        for path in self.folder.glob("hosts/*/agent-state.json"):
            with suppress(OSError, ValueError):
                found[path.parent.name] = json.loads(path.read_text())
        return found

    def _outcome(self, status: int, kills: list[Killing], output: str) -> Outcome:
        weights, samples, rounds = dict[str, str](), dict[str, int](), list[float]()
        for path in self.folder.glob("events/*worker*.jsonl"):
            for event in _events(path):
                if event.get("event") == "finished" and "parameters" in event:
                    weights[path.stem] = str(event["parameters"])
                    samples[path.stem] = int(str(event["samples"]))
                elif event.get("event") == "round":
                    rounds.append(float(str(event["time"])))
        return Outcome(status, weights, samples, sorted(rounds), kills, output)


def run(name: str, folder: Path, seed: int, kills: int, roles: str) -> Outcome:
    """Run one of JOBS, in a folder that does not exist yet."""
    return Disturbed(folder, JOBS[name], roles, Random(seed)).play(kills)


def still(outcome: Outcome, usual: float) -> Iterator[tuple[Killing, float]]:
    """For each kill, seconds until the next round that ends, beyond the usual ones; none for those after the last."""
    for kill in outcome.kills:
        after = next((when for when in outcome.rounds if when > kill.when), None)
        if after is not None:
            yield kill, max(0.0, after - kill.when - usual)


def _events(path: Path) -> Iterator[Mapping[str, object]]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def differs(name: str, outcome: Outcome, calm: Outcome) -> str:
    """What is wrong with a disturbed job; "" for nothing."""
    if outcome.status:
        return f"ended with status {outcome.status}"
    if name.split(maxsplit=1)[0] not in _TIMED:
        return "" if outcome.weights == calm.weights else "other weights"
    if name.startswith("mixed") and outcome.samples != calm.samples:
        return f"samples {outcome.samples} instead of {calm.samples}"
    return "" if len(set(outcome.weights.values())) == 1 else "workers with different weights"


def _role(process: str) -> str:
    return re.sub(r".*/|:\d+$", "", process)


def main() -> int:
    """Run jobs until enough processes were killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="of the jobs whose name contains this text")
    parser.add_argument("--roles", default="server|scheduler|worker|agent", help="a regular expression of names")
    parser.add_argument("--each", type=int, default=6, help="kills in one job")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    names = [name for name in JOBS if given.only in name]
    calm: dict[str, Outcome] = {}
    times: dict[str, list[float]] = defaultdict(list)
    wrong: list[str] = []
    killed = jobs = 0
    with tempfile.TemporaryDirectory() as base:
        while killed < given.kills:
            name, seed = names[jobs % len(names)], given.seed * 10_000 + jobs
            if name not in calm:
                calm[name] = run(name, Path(base, f"calm{jobs}"), 0, 0, given.roles)
                if calm[name].status:
                    print(calm[name].output)
                    return 1
            gaps = [later - earlier for earlier, later in zip(calm[name].rounds, calm[name].rounds[1:], strict=False)]
            outcome = run(name, Path(base, f"job{jobs}"), seed, given.each, given.roles)
            for kill, seconds in still(outcome, max(gaps, default=0.0)):
                times[_role(kill.process)].append(seconds)
            why = differs(name, outcome, calm[name])
            killed, jobs = killed + len(outcome.kills), jobs + 1
            what = ", ".join(f"{kill.process} {kill.kind}" for kill in outcome.kills)
            print(f"{name}, seed {seed}: {why or 'right'} ({what})", file=sys.stderr, flush=True)
            if why:
                wrong.append(f"{name}, seed {seed}: {why}")
                print(outcome.output, file=sys.stderr)
    rows = [
        {"role": role, "seconds": [round(one, 3) for one in sorted(each)]} for role, each in sorted(times.items())
    ]
    found = {"killed": killed, "jobs": jobs, "wrong": wrong, "rows": rows}
    if given.json:
        print(json.dumps({"schema_version": 1, "results": [found]}))
        return bool(wrong)
    print(f"{killed} kills in {jobs} jobs, {len(wrong)} of them with another result")
    print(f"{'role':20}{'kills':>8}{'median':>10}{'most':>10}   seconds without training")
    for role, each in sorted(times.items()):
        print(f"{role:20}{len(each):8}{statistics.median(each):10.2f}{max(each):10.2f}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
