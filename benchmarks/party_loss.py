"""Measures what a party's absence costs the others: a job that loses a party and gets it back, beside no loss.

    python benchmarks/party_loss.py                       fsa, hfa and diloco, with a party away for 5 minutes
    python benchmarks/party_loss.py --away 60 --algo fsa  shorter
    python benchmarks/party_loss.py --json                one object

Two equal jobs run at the same time, each on half of the machine's cores, which they swap every 10 s. Their hosts are
network namespaces behind an sshd each, with emulated links: one for the central party, and one for each party, which
has one worker. The workers train `linear` on Fashion-MNIST, with --topology central. In one of the jobs

    a party is cut off after BEFORE seconds, and comes back after --away seconds
    BETWEEN seconds later all processes of another party are killed, with their agent, and start again

"Others" compares the rounds per second of the other parties, from when the absent party is left out until it comes
back, with the rounds per second of the same parties of the calm job meanwhile. Needs root and two cores.
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

BEFORE, BETWEEN, AFTER = 30.0, 30.0, 30.0  # seconds
AWAY, KILLED = "f2", "f3"
OUT, BACK = "is left out, and counts", "takes part again, after"
ALGORITHMS: Mapping[str, Sequence[str]] = {
    "fsa": (),
    "hfa": ("--k1", "2", "--k2", "5"),
    "diloco": ("--inner-steps", "10", "--compress", "sparseloco"),
}


def play(given: argparse.Namespace, algorithm: str, base: Path) -> list[dict[str, Any]]:
    """Both jobs. Times are in seconds since a job began to train."""
    seconds = BEFORE + given.away + BETWEEN + AFTER
    training = [
        "--topology", "central", "--network", "linear", "--epochs", "100000", "--eval-every", "0", "--seed", "1",
        "--time-limit", f"{seconds:.0f}s", "--algo", algorithm, *ALGORITHMS[algorithm],
    ]  # fmt: skip
    with pair_of_sites(base, given.parties, given.rate, given.rtt) as made:
        with running(made, [training] * 2, seconds + ENDING):
            _disturb(made[-1], given.away)
        return [{**each.result(), **_seen(each)} for each in made]


def _disturb(made: Sites, away: float) -> None:
    time.sleep(BEFORE)
    with made.cut(AWAY):
        time.sleep(away)
    time.sleep(BETWEEN)
    made.kill(KILLED)


def _seen(made: Sites) -> dict[str, Any]:
    """The times at which each worker ended rounds, and what the global server said about the absent party."""
    workers: dict[str, list[float]] = {}
    samples: dict[str, int] = {}
    skipped: dict[str, int] = {}
    begun = min(event["time"] for _, event in made.events() if event.get("state") == "training")
    for worker, event in made.events():
        if event["event"] == "round":
            workers.setdefault(worker, []).append(event["time"] - begun)
        elif event["event"] == "finished":
            samples[worker], skipped[worker] = event["samples"], event.get("skipped", 0)
    times: dict[str, float] = {}
    for event in made.events_of("global_server"):
        for text in (OUT, BACK):
            if event["event"] == "warning" and text in event["message"]:
                times[text] = event["time"] - begun
    return {"times": workers, "samples": samples, "skipped": skipped, **times}


def compare(calm: Mapping[str, Any], found: Mapping[str, Any], algorithm: str, away: float) -> dict[str, Any]:
    """One row."""
    if OUT not in found or BACK not in found:
        raise CheckFailed(f"{AWAY} was not left out and taken in again", f"it was away for {away:g} s")
    out, back = found[OUT], found[BACK]
    span = (out, BEFORE + away)
    rates = [
        [_rate(times, *span) for name, times in job["times"].items() if name[1] != AWAY[1]] for job in (calm, found)
    ]
    return {
        "algorithm": algorithm, "away_s": away, "until_out_s": out - BEFORE, "until_back_s": back - BEFORE - away,
        "others": sum(rates[1]) / sum(rates[0]), "calm_rounds_per_s": sum(rates[0]) / len(rates[0]),
        "accuracy": found["accuracy"], "calm_accuracy": calm["accuracy"],
        "skipped": found["skipped"], "samples": found["samples"], "calm_samples": calm["samples"],
        "restarts": sum(found["restarts"].values()),
    }  # fmt: skip


def _rate(times: Sequence[float], begin: float, end: float) -> float:
    return sum(begin <= each < end for each in times) / (end - begin)


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows, each printed as soon as it is there."""
    rows = []
    for algorithm in given.algo or ALGORITHMS:
        with tempfile.TemporaryDirectory(prefix="gx-", dir="/tmp") as base:
            calm, found = play(given, algorithm, Path(base))
        rows.append(compare(calm, found, algorithm, given.away))
        if not given.json:
            _show(rows[-1])
    return rows


def _show(row: Mapping[str, Any]) -> None:
    print(
        f"{row['algorithm']}: {AWAY} away for {row['away_s']:g} s, left out after {row['until_out_s']:.1f} s,"
        f" takes part again {row['until_back_s']:.1f} s after its return; the others meanwhile {row['others']:.1%} of"
        f" {row['calm_rounds_per_s']:.1f} rounds/s; accuracy {row['accuracy']:.4f}, without faults"
        f" {row['calm_accuracy']:.4f}; {row['restarts']} restarts; skipped samples {row['skipped']}"
    )


def main() -> int:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", action="append", choices=ALGORITHMS, help="may be repeated; default: all")
    parser.add_argument("--parties", type=int, default=4)
    parser.add_argument("--away", type=float, default=300.0, help="seconds")
    parser.add_argument("--rate", default="50mbit", help="of each site's link")
    parser.add_argument("--rtt", default="30ms")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return conclude(lambda: measure(given), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
