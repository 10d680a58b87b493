"""Measures how much of a job's throughput remains under faults: killed and stopped processes, and partitions.

    python benchmarks/faults.py                          30 minutes with 62 faults
    python benchmarks/faults.py --minutes 3 --faults 6   shorter
    python benchmarks/faults.py --json                   one object

Two equal jobs run at the same time, each on half of the machine's cores, which they swap every 10 s. One of them has
the faults, and the other one has none. So both see the same machine, whose cores may differ, and whose speed may drift.

The hosts of a job are network namespaces behind an sshd each: one for the central party, and one for each party, which
has one worker. The workers train `linear` on Fashion-MNIST with DiLoCo, as fast as their cores can. So they share these
cores, and a round takes some 100 s. Faults come at equal distances, of which half are kills. What is hit, and
how, is drawn from the seed:

    kill   SIGKILL to a process: an agent, a scheduler, a server or a worker
    stop   SIGSTOP to one, and SIGCONT 2 to 8 s later
    cut    all packets of a host are dropped, for 2 to 8 s

Throughput is the samples of the rounds that all workers have completed, by time. Repeated samples count once. "Kept"
compares both jobs over the same time: from when both have completed their first round until one has completed its last.
Samples within a round are interpolated. Needs root and two cores.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from job_sites import ENDING, Sites, pair_of_sites, running
from outcome import conclude

from geomx_cli.core.errors import CheckFailed

TOGETHER = ("stop", "cut")
PAUSES = (2.0, 8.0)  # seconds


@dataclass(frozen=True)
class Fault:
    """seconds: since the job began to train. time: Unix seconds. what: a process or a host."""

    seconds: float
    time: float
    kind: str
    what: str


@dataclass
class Outcome:
    """workers: of each one, the times at which it has ended rounds, and its samples until then; of the rounds that all
    workers have completed.
    """

    workers: list[tuple[list[float], list[int]]]
    losses: tuple[float, float]
    restarts: int
    faults: list[Fault] = field(default_factory=list)

    @property
    def rounds(self) -> int:
        """The number of rounds that all workers have completed."""
        return len(self.workers[0][0])

    @property
    def window(self) -> tuple[float, float]:
        """When all workers have ended their first, and their last round."""
        begun, ended = (max(times[place] for times, _ in self.workers) for place in (0, -1))
        return begun, ended

    def throughput(self, window: tuple[float, float]) -> float:
        """Samples per second within this time."""
        within = (np.diff(np.interp(window, *worker))[0] for worker in self.workers)
        return float(sum(within)) / (window[1] - window[0])


def play(given: argparse.Namespace) -> tuple[Outcome, Outcome]:
    """Run both jobs. Return the results, of the job with the faults last."""
    training = [
        "--algo", "diloco", "--inner-steps", str(given.inner_steps), "--network", "linear", "--epochs", "100000",
        "--time-limit", f"{60 * given.minutes:.0f}s", "--eval-every", "0", "--restarts", "1000",
    ]  # fmt: skip
    base = tempfile.TemporaryDirectory(prefix="gx-", dir="/tmp")
    with base as folder, pair_of_sites(Path(folder), given.parties) as made:
        with running(made, [training] * 2, 60 * given.minutes + ENDING) as launched:
            done = list(_disturb(made[-1], launched[-1], Random(given.seed), 60 * given.minutes, given.faults))
        calm, found = (_outcome(each, faults) for each, faults in zip(made, ([], done), strict=True))
        return calm, found


def _disturb(
    made: Sites, launched: "subprocess.Popen[str]", random: Random, seconds: float, faults: int
) -> Iterator[Fault]:
    begun = time.monotonic()
    for number in range(faults):
        time.sleep(max(0.0, begun + (number + 0.5) * seconds / faults - time.monotonic()))
        if launched.poll() is not None:
            return
        kind = "kill" if number % 2 else random.choice(TOGETHER)
        processes = made.processes()
        what = random.choice(made.names if kind == "cut" else sorted(processes))
        fault = Fault(round(time.monotonic() - begun, 1), time.time(), kind, what)
        pause = random.uniform(*PAUSES)
        if kind == "cut":
            with made.cut(what):
                time.sleep(pause)
        elif kind == "stop":
            os.kill(processes[what], signal.SIGSTOP)
            time.sleep(pause)
            os.kill(processes[what], signal.SIGCONT)
        else:
            os.kill(processes[what], signal.SIGKILL)
        print(f"{fault.seconds:7.1f} s  {kind} {what}", file=sys.stderr, flush=True)
        yield fault


def _outcome(made: Sites, faults: list[Fault]) -> Outcome:
    result = made.result()
    ends: dict[int, dict[str, tuple[float, int, float]]] = {}
    for worker, event in made.events():
        if event["event"] == "round":  # the last event of a round counts: a restarted worker may repeat it
            ends.setdefault(event["num_iters"], {})[worker] = (event["time"], event["samples"], event["loss"])
    workers = max(map(len, ends.values()), default=0)
    whole = sorted(number for number, each in ends.items() if len(each) == workers)
    if len(whole) < 2:
        raise CheckFailed(f"the workers completed {len(whole)} rounds", "give more --minutes or less --inner-steps")
    ended = [ends[number] for number in whole]
    series = [
        ([each[worker][0] for each in ended], [each[worker][1] for each in ended]) for worker in sorted(ended[0])
    ]
    first, last = (list(each.values()) for each in (ended[0], ended[-1]))
    losses = _mean_loss(first), _mean_loss(last)
    return Outcome(series, losses, sum(result["restarts"].values()), faults)


def _mean_loss(each: Sequence[tuple[float, int, float]]) -> float:
    return sum(loss for *_, loss in each) / len(each)


def _row(calm: Outcome, found: Outcome) -> dict[str, Any]:
    (begun, ended), (other_begun, other_ended) = calm.window, found.window
    window = max(begun, other_begun), min(ended, other_ended)
    if window[0] >= window[1]:
        raise CheckFailed("the jobs completed no round at the same time", "give more --minutes or less --inner-steps")
    throughputs = calm.throughput(window), found.throughput(window)
    kinds = {kind: sum(fault.kind == kind for fault in found.faults) for kind in ("kill", *TOGETHER)}
    return {
        "faults": len(found.faults), **kinds, "seconds": window[1] - window[0],
        "faults_within": sum(window[0] <= fault.time <= window[1] for fault in found.faults),
        "restarts": found.restarts, "rounds": found.rounds,
        "losses": found.losses, "samples_per_s": throughputs[1], "calm_samples_per_s": throughputs[0],
        "calm_rounds": calm.rounds, "kept": throughputs[1] / throughputs[0],
        "list": [(fault.seconds, fault.kind, fault.what) for fault in found.faults],
    }  # fmt: skip


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        kinds = ", ".join(f"{row[kind]} of them {kind}" for kind in ("kill", *TOGETHER))
        print(f"{row['faults']} faults ({kinds}), {row['restarts']} restarts, {row['rounds']} rounds")
        print(f"loss {row['losses'][0]:.3f} -> {row['losses'][1]:.3f}")
        rates = f"{row['samples_per_s']:,.0f} samples/s instead of {row['calm_samples_per_s']:,.0f}"
        print(f"{rates}: {row['kept']:.1%} kept")


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parties", type=int, default=4, help="of each job")
    parser.add_argument("--inner-steps", type=int, default=30_000, help="steps of a worker in a round")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--faults", type=int, default=62)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return conclude(lambda: [_row(*play(given))], as_json=given.json, show=_show)


if __name__ == "__main__":
    sys.exit(main())
