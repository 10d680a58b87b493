"""How soon training reaches a test accuracy over slow links: every algorithm, and MXNet's own dist_sync.

    python benchmarks/time_to_accuracy.py                                  all, 3 seeds each, over emulated links (root)
    python benchmarks/time_to_accuracy.py --algo hfa mxnet --seeds 1
    python benchmarks/time_to_accuracy.py --heterogeneous                  one worker of four is 8 times as slow
    python benchmarks/time_to_accuracy.py --straggling-party               all workers of party A are
    python benchmarks/time_to_accuracy.py --sweep                          the learning rates, over loopback

The bundled network on Fashion-MNIST, 2 parties x 2 workers with one thread each, batch 64. Global rank 0 writes its
weights every 20 steps at the end of a round; they are evaluated when the job is over, at the same numbers of samples
for all. Prints training time, rounds and bytes over the parties' links (both ways) to the first that reaches the
target, and the accuracy at the end: medians over the seeds. Training time counts from the first step, not from the
start of the processes. Between global rounds HFA's weights are its party's mean, which is what that party would use.
"""

import argparse
import contextlib
import json
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from time_to_accuracy_job import Job, Judge, Mark
from wan import Wan

from geomx_cli import plugins
from geomx_cli.errors import GeomxError, UsageError
from geomx_cli.events import Event
from geomx_cli.options import Value, decode

ALGORITHMS: Mapping[str, Mapping[str, Value]] = {
    "fsa": {"algo": "fsa"},
    "mixed": {"algo": "mixed", "momentum": 0.0},
    "mixed-dcasgd": {"algo": "mixed", "momentum": 0.0, "optimizer": "dcasgd"},
    "hfa": {"algo": "hfa", "k1": 20, "k2": 10},
    "esync": {"algo": "esync", "min_local_steps": 12},
    "diloco": {"algo": "diloco", "inner_steps": 30, "outer_momentum": 0.5},
    "diloco-streaming": {"algo": "diloco", "inner_steps": 40, "outer_momentum": 0.5, "fragments": 2, "overlap": 10},
    "sync": {"algo": "sync"},
    "async": {"algo": "async", "momentum": 0.0},
    "mxnet": {"algo": "mxnet"},
}
OURS: dict[str, Value] = {"topology": "spread", "slice_elements": 16384}
"""What all but MXNet have, where the algorithm does not fix the topology: no party's link carries the other's share
too, and a model of 0.7 MB is cut finely enough that both directions of a link are busy at once."""

GRID = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
RATES: Mapping[str, float] = {
    "fsa": 0.05, "mixed": 0.5, "mixed-dcasgd": 0.2, "hfa": 0.05, "esync": 0.05, "diloco": 0.05,
    "diloco-streaming": 0.05, "sync": 0.05, "async": 0.5, "mxnet": 0.05,
}  # fmt: skip
"""The learning rate of each: the one of GRID with the best accuracy in --sweep --seeds 1 --epochs 1; fsa, sync and
mxnet do the same sums and share one. Momentum is 0.9, or 0 for asynchronous ones."""

TARGET = 0.80
CHECKPOINT_EVERY = 20
SITES = ("C", "A", "B")
SLOW_LAST = "8"
PACE_SECONDS = 40.0


class Bench:
    """Runs jobs one after the other, over the emulated links or over loopback, and judges them."""

    def __init__(self, arguments: argparse.Namespace, wan: Wan | None) -> None:
        self.arguments = arguments
        self._wan = wan
        self._judge = Judge()

    def job(self, name: str, directory: str, **options: Value) -> Job:
        """A job that is yet to run."""
        common = {
            "parties": 2, "workers": 2, "epochs": self.arguments.epochs, "eval_every": 0, "lr": RATES[name],
            "checkpoint_every": CHECKPOINT_EVERY,
        }  # fmt: skip
        ours = {} if name == "mxnet" else OURS | self.arguments.options
        return Job({**common, **ALGORITHMS[name], **ours, **options}, Path(directory), self._wan)

    def train(self, name: str, **options: Value) -> dict[str, Any]:
        """Train once; the figures of it."""
        with tempfile.TemporaryDirectory(prefix="gxt") as directory:
            job = self.job(name, directory, **options)
            job.run(self.arguments.limit)
            reached, last = self._judge.marks(job, self.arguments.target)
            waiting = [_waiting(job.rounds(worker)) for worker in job.workers]
        _tell(name, options, reached, last, job.ended)
        nowhere = Mark(math.inf, 0, 0, math.inf, 0.0)
        figures = {f"{when}_{key}": value for when, mark in (("reached", reached), ("last", last))
                   for key, value in vars(mark or nowhere).items()}  # fmt: skip
        return {"name": name, "ended": job.ended, "waiting": waiting, **figures}

    def median(self, name: str, **options: Value) -> dict[str, Any]:
        """The medians over all seeds."""
        runs = [self.train(name, seed=seed + 1, **options) for seed in range(self.arguments.seeds)]
        figures = {key: statistics.median_low(run[key] for run in runs) for key in runs[0] if "_" in key}
        waiting = [statistics.median_low(parts) for parts in zip(*(run["waiting"] for run in runs), strict=True)]
        times = [run["reached_seconds"] for run in runs]
        ended = all(run["ended"] for run in runs)
        return {"name": name, "ended": ended, "waiting": waiting, "all_seconds": times, **figures}


def _waiting(rounds: Sequence[Event]) -> float:
    """The part of a round that a worker waits for its result: the median over its rounds."""
    begun = [0.0, *(event["total_time"] for event in rounds)]
    parts = [event["wait"] / (event["total_time"] - start) for event, start in zip(rounds, begun, strict=False)]
    return float(statistics.median(parts)) if parts else 0.0


def _tell(name: str, options: Mapping[str, Value], reached: Mark | None, last: Mark | None, ended: bool) -> None:
    given = ", ".join(f"{key} {value}" for key, value in options.items() if value != "")
    when = f"target after {reached.seconds:.1f} s" if reached else "target not reached"
    end = f"{last.accuracy:.4f} after {last.steps} steps, {last.seconds:.1f} s" if last else "no checkpoint"
    print(f"{name} ({given}): {when}; {end}{'' if ended else ', stopped by --limit'}", file=sys.stderr, flush=True)


def compare(bench: Bench) -> list[dict[str, Any]]:
    """Every algorithm asked for."""
    rows = [bench.median(name) for name in bench.arguments.algo]
    base = next((row["reached_seconds"] for row in rows if row["name"] == "mxnet"), math.inf)
    lines = [
        [row["name"], f"{RATES[row['name']]:g}", _number(row["reached_seconds"], ".1f"), str(row["reached_rounds"]),
         _number(row["reached_wan_bytes"] / 1e6, ".1f"), f"{row['last_accuracy']:.4f}", str(row["last_steps"]),
         _number(row["last_seconds"], ".1f"), _number(base / row["reached_seconds"], ".1f")]
        for row in rows
    ]  # fmt: skip
    target = f"to {bench.arguments.target:.2f}"
    _table(["algorithm", "rate", f"s {target}", "rounds", "WAN MB", "final", "steps", "s", "x sooner"], lines, bench)
    return rows


def heterogeneous(bench: Bench) -> list[dict[str, Any]]:
    """ESync against sync with one slow worker. The slow one waits for the exchange alone, the others for it too."""
    rows = [bench.median("sync", factor=SLOW_LAST), bench.median("esync", factor=SLOW_LAST, min_local_steps=16)]
    lines = []
    for row in rows:
        *fast, slow = row["waiting"]
        part = max(fast)
        figures = [f"{100 * value:.1f} %" for value in (part, slow, max(0.0, part - slow))]
        lines.append([row["name"], _number(row["reached_seconds"], ".1f"), *figures, f"{row['last_accuracy']:.4f}"])
    target = f"s to {bench.arguments.target:.2f}"
    _table(["algorithm", target, "fast wait", "slow waits", "for the slow", "final"], lines, bench)
    return rows


def straggling_party(bench: Bench) -> list[dict[str, Any]]:
    """Steps a second of party B with MixedSync: beside a party A that is slow, and of a party alone. The global server
    is in a central party: spread over the parties, a party that is alone would have no WAN to cross. All are slowed
    down by 8, so that the parties do not take each other the cores of this machine; A by 8 times more. Each party has a
    link of its own to the global server, whose link carries both: what they lose by sharing one is no algorithm's.
    """
    rows = []
    for title, watched, options in (
        ("beside a slow party", "B", {"factor": "A=64,B=8"}), ("alone", "A", {"parties": 1, "factor": "A=8"}),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="gxt") as directory:
            job = bench.job("mixed", directory, epochs=1000, topology="central", **options)
            job.run(PACE_SECONDS)
            pace = statistics.fmean(_pace(job.rounds(name)) for name in job.workers if name.startswith(watched))
        rows.append({"name": title, "steps_per_s": pace})
    lines = [[str(row["name"]), f"{row['steps_per_s']:.2f}"] for row in rows]
    _table(["party", "steps/s"], lines, bench)
    return rows


def _pace(rounds: Sequence[Event]) -> float:
    """Steps a second, from round to round; MixedSync has one in each."""
    times = [event["total_time"] for event in rounds]
    return float((len(times) - 1) / (times[-1] - times[0]))


def sweep(bench: Bench) -> list[dict[str, Any]]:
    """The accuracy after equal samples for each rate of GRID; loopback, as no rate makes a link slower."""
    names = bench.arguments.algo
    rows = [
        {"name": name} | {f"{rate:g}": bench.median(name, lr=rate, checkpoint_every=10**9)["last_accuracy"]
                          for rate in GRID}
        for name in names
    ]  # fmt: skip
    keys = [f"{rate:g}" for rate in GRID]
    lines = [[row["name"], *(f"{row[key]:.4f}" for key in keys), max(keys, key=row.__getitem__)] for row in rows]
    _table(["algorithm", *keys, "best"], lines, bench)
    return rows


def _number(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]], bench: Bench) -> None:
    if bench.arguments.json:
        return
    widths = [max(len(row[column]) for row in (heads, *lines)) for column in range(len(heads))]
    for row in (heads, *lines):
        print("  ".join(word.ljust(width) if not column else word.rjust(width)
                        for column, (word, width) in enumerate(zip(row, widths, strict=True))))  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--target", type=float, default=TARGET, help="test accuracy")
    parser.add_argument("--rate", default="50mbit", help="of each party's link; '' is no limit")
    parser.add_argument("--rtt", default="30ms", help="round trip between parties; '' is no delay")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a job is stopped")
    parser.add_argument(
        "--set", dest="options", nargs="+", type=_option, default=[], metavar="OPTION=VALUE",
        help="of geomx launch, for all but mxnet",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one object")
    which = parser.add_mutually_exclusive_group()
    for what in (heterogeneous, straggling_party, sweep):
        flag = "--" + what.__name__.replace("_", "-")
        which.add_argument(flag, dest="what", action="store_const", const=what, help=what.__doc__)
    parser.set_defaults(what=compare)
    arguments = parser.parse_args()
    arguments.options = dict(arguments.options)
    return arguments


def _option(text: str) -> tuple[str, Value]:
    name, _, value = text.partition("=")
    table = {option.name: option for option in plugins.table()}
    if name not in table:
        raise argparse.ArgumentTypeError(f"there is no option {name!r}")
    return name, decode(table[name], value)


def main() -> int:
    """Run what is asked for."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # either way no process of a job is left behind
    try:
        arguments = _arguments()
        if arguments.seeds < 1 or arguments.epochs < 1:
            raise UsageError("--seeds and --epochs count from 1")
        with contextlib.ExitStack() as stack:
            wan = None
            if arguments.what is not sweep and (arguments.rate or arguments.rtt):
                wide = SITES[:1] if arguments.what is straggling_party else ()
                wan = stack.enter_context(Wan(SITES, arguments.rate or None, arguments.rtt or None, wide))
                test = wan.self_test()
                print("\n".join(test.lines()), file=sys.stderr, flush=True)
                test.check()
            rows = arguments.what(Bench(arguments, wan))
    except GeomxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps({"schema_version": 1, "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
