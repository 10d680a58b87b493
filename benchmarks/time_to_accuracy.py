"""Measures the time to a test accuracy over slow links: every algorithm, and MXNet's own dist_sync.

    python benchmarks/time_to_accuracy.py                                  all, 3 seeds each, over emulated links (root)
    python benchmarks/time_to_accuracy.py --algo hfa mxnet --seeds 1
    python benchmarks/time_to_accuracy.py --task by-party                  parties have different classes
    python benchmarks/time_to_accuracy.py --heterogeneous                  one worker of four is 8 times as slow
    python benchmarks/time_to_accuracy.py --straggling-party               all workers of party A are
    python benchmarks/time_to_accuracy.py --sweep                          learning rates and settings
    python benchmarks/time_to_accuracy.py --bounds                         MXNet's slices
    python benchmarks/time_to_accuracy.py --codecs --rate '' --rtt ''      accuracy with every codec, over loopback

The bundled network on Fashion-MNIST, 2 parties x 2 workers with one thread each, batch 64. Global rank 0 writes the
global model at the end of a round, every 5 steps, or, if rounds have more steps, in each round that makes a new one.
These checkpoints are evaluated after the job. Prints training time, steps and bytes over the parties' links (both
directions) until the first one that reaches a target, and the final accuracy, of the median run over the seeds.
Training time counts from the first step, not from the start of the processes.
"""

import argparse
import contextlib
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outcome import conclude
from time_to_accuracy_job import Job, Judge, Mark
from time_to_accuracy_settings import CODECS, GRID, MXNET, ROUNDS, ROWS, TASKS
from wan import Wan

from geomx_cli.core import plugins
from geomx_cli.core.errors import CheckFailed, InvalidSettings, UsageError
from geomx_cli.core.events import RoundCompleted
from geomx_cli.core.options import Value, decode
from geomx_cli.runtime.bundled.checkpoint import Checkpoint

SAVE_EVERY = 5
NOTHING = Mark(math.inf, 0, 0, math.inf, 0.0)
SITES = ("C", "A", "B")
SLOW_LAST = "8"
PACE_SECONDS = 40.0
BOUNDS = (1_000_000, 100_000, 50_000, 25_000, 10_000)


class Bench:
    """Runs jobs one after another, over the emulated links or over loopback, and evaluates them."""

    def __init__(self, arguments: argparse.Namespace, wan: Wan | None) -> None:
        self.arguments = arguments
        self.wan = wan
        self._task = TASKS[arguments.task]
        self.targets = arguments.target or self._task.targets
        self._judge = Judge()

    def options(self, name: str) -> dict[str, Value]:
        """The options of a row in this task."""
        row = ROWS[name]
        own = {**row.options, **self._task.rows.get(name, {})}
        if row.same_as:
            own["lr"] = ROWS[row.same_as].options["lr"]
        return own if own["algo"] == MXNET else own | self.arguments.options

    def job(self, name: str, directory: str, options: Mapping[str, Value], bound: int = 0) -> Job:
        """A job, not started. `bound`: overrides the row's."""
        common = {
            "parties": 2, "workers": 2, "epochs": self.arguments.epochs, "eval_every": 0,
            "save_every": SAVE_EVERY, **self._task.options,
        }  # fmt: skip
        row = ROWS[name]
        options = {**common, **self.options(name), **options}
        return Job(options, Path(directory), self.wan, row.servers, bound or row.bound)

    def train(self, name: str, **options: Value) -> dict[str, Any]:
        """Train once and return the figures."""
        with tempfile.TemporaryDirectory(prefix="gxt") as directory:
            job = self.job(name, directory, options)
            job.run(self.arguments.limit)
            marks = self._judge.every_mark(job) if self.arguments.curve else []
            *reached, last = self._judge.marks(job, self.targets)
            waiting = [_waiting(job.rounds(worker)) for worker in job.workers]
        _tell(name, options, list(zip(self.targets, reached, strict=True)), last, job.ended)
        curve = [(mark.seconds, mark.accuracy) for mark in marks]
        return {"ended": job.ended, "waiting": waiting, "reached": reached, "last": last or NOTHING, "curve": curve}

    def finals(self, name: str, options: Mapping[str, Value]) -> dict[str, Any]:
        """Train with all seeds; only the final global model is evaluated. accuracy and wan_bytes: medians."""
        found = []
        for seed in range(1, self.arguments.seeds + 1):
            with tempfile.TemporaryDirectory(prefix="gxt") as directory:
                given = {"algo": name, "topology": "spread", **options, "seed": seed, "save_every": 1_000_000}
                job = self.job(name, directory, given)
                job.run(self.arguments.limit)
                *_, last = self._judge.marks(job, ())
            _tell(name, {**options, "seed": seed}, (), last, job.ended)
            found.append(last or NOTHING)
        accuracies, sent = ([getattr(mark, what) for mark in found] for what in ("accuracy", "wan_bytes"))
        middle = statistics.median_low(accuracies), statistics.median_low(sent)
        return {"name": name, "accuracy": middle[0], "wan_bytes": middle[1], "all": accuracies}

    def median(self, name: str, **options: Value) -> dict[str, Any]:
        """Train with all seeds: for each target the run with the median time to it, and the one with the median final
        accuracy; of an even number the worse of the two in the middle. A run that does not reach a target counts as
        infinite.
        """
        runs = [self.train(name, seed=seed + 1, **options) for seed in range(self.arguments.seeds)]
        targets = []
        for marks in zip(*(run["reached"] for run in runs), strict=True):
            ordered = sorted((mark or NOTHING for mark in marks), key=lambda mark: mark.seconds)
            times = [mark.seconds for mark in ordered]
            targets.append({**vars(ordered[len(ordered) // 2]), "all_seconds": times})
        last = sorted((run["last"] for run in runs), key=lambda mark: mark.accuracy)[(len(runs) - 1) // 2]
        waiting = [statistics.median_low(parts) for parts in zip(*(run["waiting"] for run in runs), strict=True)]
        ended = all(run["ended"] for run in runs)
        sooner = sorted(runs, key=lambda run: (run["reached"][-1] or NOTHING).seconds)
        curve = sooner[len(sooner) // 2]["curve"]
        accuracies = [(run["last"] or NOTHING).accuracy for run in runs]
        found = {"name": name, "ended": ended, "waiting": waiting, "targets": targets, "last": vars(last),
                 "accuracies": accuracies}  # fmt: skip
        return found | ({"curve": curve} if self.arguments.curve else {})


def _waiting(rounds: Sequence[RoundCompleted]) -> float:
    """The fraction of a round that a worker waits for its result: the median over its rounds."""
    begun = [0.0, *(event.total_time for event in rounds)]
    parts = [(event.wait or 0.0) / (event.total_time - start) for event, start in zip(rounds, begun, strict=False)]
    return float(statistics.median(parts)) if parts else 0.0


def _tell(
    name: str, options: Mapping[str, Value], reached: Sequence[tuple[float, Mark | None]], last: Mark | None,
    ended: bool,
) -> None:  # fmt: skip
    given = ", ".join(f"{key} {value}" for key, value in options.items() if value != "")
    marks = [
        f"{target:.2f} after {mark.seconds:.1f} s and {mark.steps} steps" if mark else f"{target:.2f} not reached"
        for target, mark in reached
    ]
    end = f"{last.accuracy:.4f} after {last.steps} steps, {last.seconds:.1f} s" if last else "no checkpoint"
    ending = "" if ended else ", stopped by --limit"
    print(f"{name} ({given}): {'; '.join([*marks, end])}{ending}", file=sys.stderr, flush=True)


def compare(bench: Bench) -> list[dict[str, Any]]:
    """Measure every requested algorithm."""
    rows = [bench.median(name) for name in bench.arguments.algo]
    heads, lines = ["algorithm"], [[row["name"]] for row in rows]
    stock = [row for row in rows if ROWS[row["name"]].options["algo"] == MXNET]
    for index, target in enumerate(bench.targets):
        base = min((row["targets"][index]["seconds"] for row in stock), default=math.inf)
        heads += [f"s to {target:g}", "reached", "steps", "WAN MB", "x sooner"]
        for row, line in zip(rows, lines, strict=True):
            mark = row["targets"][index]
            times = mark["all_seconds"]
            line += [_number(mark["seconds"], ".1f"), f"{sum(map(math.isfinite, times))} of {len(times)}",
                     str(mark["steps"] or "-"), _number(mark["wan_bytes"] / 1e6, ".4g"),
                     _number(base / mark["seconds"], ".1f")]  # fmt: skip
    heads += ["final", "steps", "s"]
    for row, line in zip(rows, lines, strict=True):
        last = row["last"]
        stopped = "" if row["ended"] else " (--limit)"
        line += [f"{last['accuracy']:.4f}", str(last["steps"]), _number(last["seconds"], ".1f") + stopped]
    _table(heads, lines, bench)
    if not bench.arguments.json:
        print(*(f"{row['name']}: {_command(bench, row['name'])}" for row in rows), sep="\n")
    return rows


def _command(bench: Bench, name: str) -> str:
    """The command line that starts the row's job."""
    options = {**TASKS[bench.arguments.task].options, **bench.options(name)}
    if options["algo"] == MXNET:
        row = ROWS[name]
        own = ", ".join(f"{key} {options[key]}" for key in ("lr", "momentum", "compress") if key in options)
        return f"servers at {' and '.join(row.servers)}, MXNET_KVSTORE_BIGARRAY_BOUND={row.bound}, {own}"
    return "geomx launch " + " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())


def heterogeneous(bench: Bench) -> list[dict[str, Any]]:
    """ESync against sync with one slow worker. The slow one waits only for the exchange, the others also for it."""
    rows = [bench.median("sync", slowdown=SLOW_LAST), bench.median("esync", slowdown=SLOW_LAST, min_local_steps=16)]
    lines = []
    for row in rows:
        *fast, slow = row["waiting"]
        part = max(fast)
        figures = [f"{100 * value:.1f} %" for value in (part, slow, max(0.0, part - slow))]
        seconds = _number(row["targets"][0]["seconds"], ".1f")
        lines.append([row["name"], seconds, *figures, f"{row['last']['accuracy']:.4f}"])
    heads = ["algorithm", f"s to {bench.targets[0]:g}", "fast wait", "slow waits", "for the slow", "final"]
    _table(heads, lines, bench)
    return rows


def straggling_party(bench: Bench) -> list[dict[str, Any]]:
    """Steps per second of party B with MixedSync: beside a slow party A, and as the only party. The global server is in
    a central party: if spread over the parties, a single party would have no WAN to cross. All workers are slowed down
    by 8, so that the parties do not compete for the cores of this machine; A by 8 times more. Each party has a link of
    its own to the global server, whose own link carries both, because a loss from sharing one is not due to the
    algorithm.
    """
    rows = []
    for title, watched, options in (
        ("beside a slow party", "B", dict[str, Value](slowdown="A=64,B=8")),
        ("alone", "A", dict[str, Value](parties=1, slowdown="A=8")),
    ):
        with tempfile.TemporaryDirectory(prefix="gxt") as directory:
            job = bench.job("mixed", directory, {"epochs": 1000, "topology": "central", **options})
            job.run(PACE_SECONDS)
            pace = statistics.fmean(_pace(job.rounds(name)) for name in job.workers if name.startswith(watched))
        rows.append({"name": title, "steps_per_s": pace})
    lines = [[str(row["name"]), f"{row['steps_per_s']:.2f}"] for row in rows]
    _table(["party", "steps/s"], lines, bench)
    return rows


def _pace(rounds: Sequence[RoundCompleted]) -> float:
    """Steps per second, from round to round; a MixedSync round has one step."""
    times = [event.total_time for event in rounds]
    return float((len(times) - 1) / (times[-1] - times[0]))


def sweep(bench: Bench) -> list[dict[str, Any]]:
    """Twelve runs of each algorithm: the rates of GRID, then six more settings at the rate that reaches the first
    target soonest. Best: the one that reaches it soonest, of those that end within 0.01 of the highest accuracy. If
    every step is an exchange, --rate '' --rtt '' is quicker and gives the same order, as all rates have the same time
    per step. Rows with the same arithmetic as another are left out.
    """
    rows: list[dict[str, Any]] = []
    for name in (name for name in bench.arguments.algo if not ROWS[name].same_as):
        rates = [_tried(bench, name, {**ROWS[name].start, "lr": rate}) for rate in GRID]
        best = min(rates, key=_rank)["tried"]
        rows += rates + [_tried(bench, name, {**best, **more}) for more in ROWS[name].tried]
    lines = []
    for row in rows:
        others = [other for other in rows if other["name"] == row["name"]]
        highest = max(other["last"]["accuracy"] for other in others)
        chosen = min((other for other in others if other["last"]["accuracy"] >= highest - 0.01), key=_rank) is row
        settings = ", ".join(f"{key} {value:g}" for key, value in sorted(row["tried"].items()))
        mark = row["targets"][0]
        lines.append([f"{row['name']}: {settings}", _number(mark["seconds"], ".1f"), str(mark["steps"] or "-"),
                      f"{row['last']['accuracy']:.4f}", "best" if chosen else ""])  # fmt: skip
    _table(["settings", f"s to {bench.targets[0]:g}", "steps", "final", ""], lines, bench)
    return rows


def _tried(bench: Bench, name: str, settings: dict[str, Value]) -> dict[str, Any]:
    return {**bench.median(name, **settings), "tried": settings}


def _rank(row: Mapping[str, Any]) -> tuple[float, float]:
    return row["targets"][0]["seconds"], -row["last"]["accuracy"]


def bounds(bench: Bench) -> list[dict[str, Any]]:
    """Seconds per step of MXNet for each way of cutting its tensors, with its servers in the parties."""
    rows = []
    for bound in BOUNDS:
        with tempfile.TemporaryDirectory(prefix="gxt") as directory:
            job = bench.job("mxnet", directory, {}, bound)
            job.run(PACE_SECONDS)
            found = [Checkpoint.read(path) for path in job.checkpoints()]
        if len(found) < 2:
            raise CheckFailed(f"MXNet took less than {2 * SAVE_EVERY} steps in {PACE_SECONDS:g} s")
        first, *_, last = found
        pace = (last.seconds - first.seconds) / (last.steps - first.steps)
        rows.append({"bound": bound, "seconds_per_step": pace})
    _table(["bound", "s/step"], [[str(row["bound"]), f"{row['seconds_per_step']:.3f}"] for row in rows], bench)
    return rows


def codecs(bench: Bench) -> list[dict[str, Any]]:
    """Final accuracy with every codec in fsa, hfa and diloco after the same samples, and over emulated links the
    bytes sent. The accuracy of synchronous algorithms does not depend on the links, so --rate '' --rtt '' is quicker.
    """
    rows: list[dict[str, Any]] = []
    for codec in bench.arguments.codec or CODECS:
        for name, rounds in ROUNDS.items():
            if name in bench.arguments.algo:
                own = CODECS.get(codec, {}).get(name, {})
                rows.append({**bench.finals(name, {**rounds, **own, "compress": codec}), "codec": codec})
    lines = []
    for row in rows:
        plain = [one["accuracy"] for one in rows if (one["name"], one["codec"]) == (row["name"], "none")]
        change = f"{row['accuracy'] - plain[0]:+.4f}" if plain else "-"
        seeds = " ".join(f"{one:.4f}" for one in row["all"])
        sent = f"{row['wan_bytes'] / 1e6:.4g}" if bench.wan is not None else "-"
        lines.append([f"{row['codec']}: {row['name']}", f"{row['accuracy']:.4f}", change, seeds, sent])
    _table(["codec: algorithm", "accuracy", "change", "seeds", "WAN MB"], lines, bench)
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
    parser.add_argument("--algo", nargs="+", choices=list(ROWS), metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--task", choices=list(TASKS), default="iid", help="how the data are divided")
    parser.add_argument("--target", type=float, nargs="+", default=[], help="test accuracies; default: the task's")
    parser.add_argument("--rate", default="50mbit", help="of each party's link; '' is no limit")
    parser.add_argument("--rtt", default="30ms", help="round trip between parties; '' is no delay")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a job is stopped")
    parser.add_argument(
        "--set", dest="options", nargs="+", type=_option, default=[], metavar="OPTION=VALUE",
        help="of geomx launch, for all but mxnet",
    )  # fmt: skip
    parser.add_argument("--codec", nargs="+", metavar="SPEC", help="of --codecs; default: all")
    parser.add_argument("--json", action="store_true", help="print one object")
    parser.add_argument(
        "--curve", action="store_true",
        help="evaluate all checkpoints too: the curve of the run with the median time to the last target, for curve.py",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    for what in (heterogeneous, straggling_party, sweep, bounds, codecs):
        flag = "--" + what.__name__.replace("_", "-")
        which.add_argument(flag, dest="what", action="store_const", const=what, help=what.__doc__)
    parser.set_defaults(what=compare)
    arguments = parser.parse_args()
    arguments.options = dict(arguments.options)
    arguments.algo = arguments.algo or [name for name, row in ROWS.items() if row.task in ("", arguments.task)]
    return arguments


def _option(text: str) -> tuple[str, Value]:
    name, _, value = text.partition("=")
    table = {option.name: option for option in plugins.table()}
    if name not in table:
        raise argparse.ArgumentTypeError(f"there is no option {name!r}")
    try:
        return name, decode(table[name], value)
    except InvalidSettings as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def main() -> int:
    """Run the requested measurement."""
    # so that no process of a job is left behind by either signal
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    arguments = _arguments()

    def measure() -> list[dict[str, Any]]:
        if arguments.seeds < 1 or arguments.epochs < 1:
            raise UsageError("--seeds and --epochs count from 1")
        with contextlib.ExitStack() as stack:
            wan = None
            if arguments.rate or arguments.rtt:
                wide = SITES[:1] if arguments.what is straggling_party else ()
                wan = stack.enter_context(Wan(SITES, arguments.rate or None, arguments.rtt or None, wide))
                test = wan.self_test()
                print("\n".join(test.lines()), file=sys.stderr, flush=True)
                test.check()
            rows: list[dict[str, Any]] = arguments.what(Bench(arguments, wan))
            return rows

    return conclude(measure, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
