"""Compares decoupled with synchronous DiLoCo where a party is slow and parties die: time to an accuracy, side by side.

    python benchmarks/decoupled.py                two jobs for 5 minutes
    python benchmarks/decoupled.py --minutes 2    shorter
    python benchmarks/decoupled.py --json         one object
    python benchmarks/decoupled.py --network cnn  in MXNet

Two jobs run at the same time, each on half of the machine's cores, which they swap every 10 s: one with --algo diloco,
and one with --algo decoupled, otherwise equal. Their hosts are network namespaces behind an sshd each, with emulated
links: one for the central party, and one for each party, which has one worker. The workers train on Fashion-MNIST. In
both jobs

    the last party takes its steps SLOWER times as slowly
    every minute all processes of one of the other parties are killed, with their agent, and start again

Times are from the beginning of a job's training until the global model has the accuracy. "Others" are the samples per
second of the parties that are not slow. Needs root and two cores.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from job_sites import ENDING, Sites, pair_of_sites, running
from outcome import conclude

from geomx_cli.core.errors import CheckFailed

SLOWER, EVERY = 5, 60.0  # seconds
ALGORITHMS = ("diloco", "decoupled")
ACCURACIES = (0.7, 0.8, 0.85, 0.88)


def play(given: argparse.Namespace, base: Path) -> list[dict[str, Any]]:
    """Both jobs."""
    with pair_of_sites(base, given.parties, given.rate, given.rtt) as made:
        training = [
            [
                "--topology", "central", "--network", given.network, "--epochs", "100000", "--seed", "1",
                "--restarts", "1000", "--eval-every", str(given.inner_steps), "--inner-steps", str(given.inner_steps),
                "--algo", algorithm, "--time-limit", f"{60 * given.minutes:.0f}s",
                "--slowdown", f"{each.names[-1]}={SLOWER}",
            ]
            for each, algorithm in zip(made, ALGORITHMS, strict=True)
        ]  # fmt: skip
        with running(made, training, 60 * given.minutes + ENDING):
            _kill(made, 60 * given.minutes)
        return [_seen(each, algorithm) for each, algorithm in zip(made, ALGORITHMS, strict=True)]


def _kill(made: Sequence[Sites], seconds: float) -> None:
    """Every minute one of the fast parties, in turn."""
    begun = time.monotonic()
    for number in range(int((seconds - EVERY / 2) // EVERY)):
        time.sleep(max(0.0, begun + (number + 1) * EVERY - time.monotonic()))
        for each in made:
            fast = each.names[1:-1]
            each.kill(fast[number % len(fast)])


def _seen(made: Sites, algorithm: str) -> dict[str, Any]:
    result = made.result()
    begun = min(event["time"] for _, event in made.events() if event.get("state") == "training")
    reached: dict[float, float] = {}
    samples: dict[str, int] = {}
    last = begun
    for worker, event in made.events():
        if event["event"] != "round":
            continue
        last = max(last, event["time"])
        samples[worker] = max(samples.get(worker, 0), event.get("samples", 0))
        for accuracy in ACCURACIES:
            if (event.get("accuracy") or 0.0) >= accuracy:
                reached[accuracy] = min(reached.get(accuracy, event["time"] - begun), event["time"] - begun)
    if last == begun:
        raise CheckFailed(f"the job with {algorithm} completed no round", "give more --minutes")
    slow = made.names[-1]
    others = sum(count for worker, count in samples.items() if not worker.startswith(slow))
    return {
        "algorithm": algorithm, "reached_s": {str(accuracy): reached.get(accuracy) for accuracy in ACCURACIES},
        "others_samples_s": others / (last - begun), "samples": samples, "accuracy": result["accuracy"],
        "restarts": sum(result["restarts"].values()), "seconds": last - begun,
    }  # fmt: skip


def _show(results: Sequence[Mapping[str, Any]]) -> None:
    for row in results:
        times = ", ".join(
            f"{accuracy} never" if seconds is None else f"{accuracy} after {seconds:.1f} s"
            for accuracy, seconds in row["reached_s"].items()
        )
        print(
            f"{row['algorithm']}: accuracy {times}; {row['accuracy']:.4f} at the end;"
            f" others {row['others_samples_s']:,.0f} samples/s; {row['restarts']} restarts"
        )


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--parties", type=int, default=4)
    parser.add_argument("--inner-steps", type=int, default=50)
    parser.add_argument("--network", default="linear", help="as of geomx launch")
    parser.add_argument("--rate", default="50mbit", help="of each site's link")
    parser.add_argument("--rtt", default="30ms")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()

    def measure() -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="gx-", dir="/tmp") as base:
            return play(given, Path(base))

    return conclude(measure, as_json=given.json, show=_show)


if __name__ == "__main__":
    sys.exit(main())
