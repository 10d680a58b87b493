"""Measures DiLoCo with sparseloco on a language model over slow links, against training in one process and against DDP.

    .venv-torch/bin/python benchmarks/language_model.py                     the table, over emulated links (root)
    .venv-torch/bin/python benchmarks/language_model.py --row single diloco --rate '' --rtt ''       losses only
    .venv-torch/bin/python benchmarks/language_model.py --sweep --row single diloco --rate '' --rtt ''
    .venv-torch/bin/python benchmarks/language_model.py --steps 300 --layers 4 --width 192 --context 128

The bundled network gpt on the novels of `geomx data fetch austen`, 2 parties x 2 workers with one thread each. Every
worker trains on a contiguous part of the text, in as few epochs as it allows, and takes --steps steps, or in the rows
with "half" twice as many in batches of half the size. Rows:

    single          one process, the same characters: batches of all workers together
    single-half     the same, in batches of half the size at a lower rate
    diloco          --algo diloco --inner-steps 30 --outer-lr 3 --compress sparseloco; results are applied 8 steps later
    diloco-256      the same with --compress sparseloco:1,keep=256 --outer-lr 2
    diloco-1024     the same with --compress sparseloco:1,keep=1024 --outer-lr 0.9 --outer-momentum 0.6 --overlap 6
    diloco-q4       the same with --compress q4 --outer-lr 0.9 --outer-momentum 0.5
    party-half      as diloco with --reduce torch: a party trains as one worker
    fsa             --algo fsa without codec: the mean gradient in each step
    ddp             DistributedDataParallel through the process group of geomx

fsa and ddp compute the steps of `single` at the links' pace, so they take only --ddp-steps steps: bytes and seconds of
the others are those of as many more. Prints the validation loss after the last step, seconds, the share of its time in
which a worker computes (the mean over workers), and the bytes over the parties' links, in both directions.
"""

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from language_model_data import CHARACTERS
from outcome import conclude
from time_to_accuracy import SITES, _table
from time_to_accuracy_job import Job
from wan import Wan

from geomx_cli.core.errors import CheckFailed, UsageError
from geomx_cli.core.events import ProcessFinished, Reported, RoundCompleted, StateChanged
from geomx_cli.core.options import Value
from geomx_cli.datasets import fetch
from geomx_cli.runtime.data import reader

WORKERS = 4
SKIPPED = 2  # steps of fsa and ddp before the first that counts
OUTER: Mapping[str, Value] = {
    "algo": "diloco", "topology": "spread", "inner_steps": 30, "outer_lr": 3.0, "outer_momentum": 0.0,
    "compress": "sparseloco", "overlap": 8, "mix": 0.0, "lr": 0.003,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """options: of geomx launch. script: what workers run instead of the bundled job. halved: batches have half the
    size, and there are twice as many steps. partly: only --ddp-steps steps are taken.
    """

    options: Mapping[str, Value]
    script: str = ""
    halved: bool = False
    partly: bool = False

    @property
    def single(self) -> bool:
        """Whether one process trains, without links."""
        return self.options["algo"] == "local"


ROWS: Mapping[str, Row] = {
    "single": Row({"algo": "local", "lr": 0.003}),
    "single-half": Row({"algo": "local", "lr": 0.002}, halved=True),
    "diloco": Row(OUTER),
    "diloco-256": Row({**OUTER, "compress": "sparseloco:1,keep=256", "outer_lr": 2.0, "lr": 0.008}),
    "diloco-1024": Row(
        {**OUTER, "overlap": 6, "compress": "sparseloco:1,keep=1024"}
        | {"outer_lr": 0.9, "outer_momentum": 0.6, "lr": 0.008}
    ),
    "diloco-q4": Row({**OUTER, "compress": "q4", "outer_lr": 0.9, "outer_momentum": 0.5, "lr": 0.004}),
    "party-half": Row({**OUTER, "reduce": "torch", "lr": 0.002}, "language_model_party.py", halved=True),
    "fsa": Row({"algo": "fsa", "topology": "spread"}, partly=True),
    "ddp": Row(
        {"algo": "fsa", "topology": "spread", "lr": 0.003, "rank_scope": "global"}, "language_model_ddp.py", partly=True
    ),
}
"""Rates and outer steps to begin with: choose the best of --sweep, for `single` too."""
GRID: Mapping[str, list[Mapping[str, Value]]] = {
    "single": [{"lr": rate} for rate in (0.001, 0.002, 0.003, 0.004, 0.006)],
    "single-half": [{"lr": rate} for rate in (0.001, 0.0015, 0.002, 0.003)],
    "party-half": [*({"lr": rate} for rate in (0.0015, 0.002, 0.003)), *({"outer_lr": rate} for rate in (2.0, 4.0))],
    "diloco": [
        *({"lr": rate} for rate in (0.002, 0.003, 0.004)),
        *({"outer_lr": rate} for rate in (1.0, 2.0, 4.0)),
        *({"overlap": steps} for steps in (0, 16)),
        {"mix": 0.5},
        {"compress": "sparseloco:1"},
    ],
    "diloco-256": [{"lr": rate} for rate in (0.004, 0.008, 0.012)],
    "diloco-1024": [
        {"lr": 0.004}, {"lr": 0.008}, {"compress": "none", "lr": 0.004}, {"compress": "none", "lr": 0.008},
        {"outer_momentum": 0.5}, {"outer_lr": 1.1, "outer_momentum": 0.5},
    ],
}


@dataclass
class Result:
    """loss: None if not trained to the end. seconds, wan_bytes: of all steps. computing: None if unknown."""

    name: str
    loss: float | None
    seconds: float
    computing: float | None
    wan_bytes: float | None


class Bench:
    """Runs jobs one after another."""

    def __init__(self, arguments: argparse.Namespace, wan: Wan | None) -> None:
        self._given = arguments
        self._wan = wan
        self._length = len(reader.read_text("austen", "train", ""))

    def run(self, name: str, own: Mapping[str, Value]) -> Result:
        """Train a row, with options of its own."""
        given, row = self._given, ROWS[name]
        batch, all_steps = given.batch_size, given.steps
        if row.halved:
            if batch % 2:
                raise UsageError(f"{name} cannot halve a --batch-size of {batch}", "give an even one")
            batch, all_steps = batch // 2, 2 * all_steps
        # each part has one window more than is seen, as windows begin anywhere in the first
        spare = (1 if row.single else WORKERS) * (given.context + 1)
        step = WORKERS * batch * given.context
        epochs = 1 if row.partly else -(-all_steps * step // (self._length - WORKERS * (given.context + 1)))
        steps = given.ddp_steps if row.partly else all_steps // epochs
        os.environ[CHARACTERS] = str(steps * step + spare)
        sizes = {"layers": given.layers, "width": given.width, "context": given.context}
        options: dict[str, Value] = {
            "parties": 2, "workers": 2, "network": "gpt", "framework": "torch", "optimizer": "adamw",
            "schedule": "cosine", "data": "language_model_data:text", "epochs": epochs, "eval_every": 0,
            "seed": given.seed, "batch_size": batch * (WORKERS if row.single else 1), **sizes, **row.options, **own,
        }  # fmt: skip
        script: tuple[str, ...] = ()
        if row.script:
            words = (*sizes.values(), batch, steps * epochs, options["lr"])
            script = (sys.executable, str(Path(__file__).with_name(row.script)), *map(str, words))
        with tempfile.TemporaryDirectory(prefix="gxt") as directory:
            job = Job(options, Path(directory), None if row.single else self._wan, script=script)
            job.run(given.limit)
            if not job.ended:
                raise CheckFailed(f"{name} was stopped by --limit")
            measured = self._partly if row.partly else self._reported if script else self._whole
            result = measured(name, job)
        loss = "" if result.loss is None else f"validation loss {result.loss:.4f}, "
        tried = ", ".join(f"{key} {value}" for key, value in own.items())
        print(f"{name} ({tried}): {loss}{result.seconds:.1f} s", file=sys.stderr, flush=True)
        return result

    def _whole(self, name: str, job: Job) -> Result:
        ends = [one for worker in job.workers for one in job.events(worker) if isinstance(one, ProcessFinished)]
        begun = [one for one in job.events(job.workers[0]) if isinstance(one, StateChanged) and one.state == "training"]
        seconds = max(one.seconds or 0.0 for one in ends)
        shares = [_computing(job.rounds(worker)) for worker in job.workers]
        loss = next(one.validation_loss for one in ends if one.validation_loss is not None)
        sent = job.bytes_between(begun[0].time, begun[0].time + seconds)
        return Result(name, loss, seconds, statistics.fmean(shares), sent)

    def _reported(self, name: str, job: Job) -> Result:
        """What language_model_party.py reports."""
        ends = [
            next(event for event in job.events(worker) if isinstance(event, Reported) and "computing" in event.metrics)
            for worker in job.workers
        ]
        shares = {key: statistics.fmean(end.metrics[key] / end.metrics["seconds"] for end in ends)
                  for key in ("computing", "waiting")}  # fmt: skip
        seconds = ends[0].metrics["seconds"]
        loss = next(event.metrics["validation_loss"] for event in job.events(job.workers[0])
                    if isinstance(event, Reported) and "validation_loss" in event.metrics)  # fmt: skip
        sent = job.bytes_between(ends[0].time - seconds, ends[0].time)
        print(f"{name}: {shares['waiting']:.1%} waiting for the party's gradients", file=sys.stderr)
        return Result(name, loss, seconds, shares["computing"], sent)

    def _partly(self, name: str, job: Job) -> Result:
        """Seconds and bytes of all steps, from those after the first SKIPPED."""
        kind = Reported if name == "ddp" else RoundCompleted
        found = [event for event in job.events(job.workers[0]) if isinstance(event, kind)]
        first, last = found[SKIPPED - 1], found[-1]
        factor = self._given.steps / (len(found) - SKIPPED)
        sent = job.bytes_between(first.time, last.time)
        share = None if name == "ddp" else _computing(job.rounds(job.workers[0])[SKIPPED:], first.total_time)
        seconds = (last.total_time - first.total_time) * factor
        return Result(name, None, seconds, share, None if sent is None else sent * factor)


def _computing(rounds: list[RoundCompleted], since: float = 0.0) -> float:
    return sum(one.compute or 0.0 for one in rounds) / (rounds[-1].total_time - since)


def table(bench: Bench, arguments: argparse.Namespace) -> list[Result]:
    """Run every row once and print them beside each other."""
    own: Mapping[str, Value] = {"lr": arguments.lr} if arguments.lr else {}
    rows = {name: bench.run(name, own) for name in arguments.row}
    base = min((row.loss for name, row in rows.items() if ROWS[name].single and row.loss), default=None)
    fsa = rows.get("fsa")
    lines = []
    for name, row in rows.items():
        loss = more = less = sent = share = "-"
        if row.loss is not None:
            loss = f"{row.loss:.4f}"
            more = "-" if base is None else f"{100 * (row.loss / base - 1):+.2f} %"
        if row.wan_bytes is not None:
            sent = f"{row.wan_bytes / 1e6:.4g}"
            less = "-" if fsa is None or not fsa.wan_bytes else f"{fsa.wan_bytes / row.wan_bytes:.4g}"
        if row.computing is not None and not ROWS[name].single:
            share = f"{100 * row.computing:.1f} %"
        lines.append([name, loss, more, f"{row.seconds:.0f}", share, sent, less])
    heads = ["row", "validation loss", "to the best of one process", "s", "computing", "WAN MB", "fsa's / its"]
    _table(heads, lines, argparse.Namespace(arguments=arguments))  # type: ignore[arg-type]
    return list(rows.values())


def sweep(bench: Bench, arguments: argparse.Namespace) -> list[Result]:
    """Try the settings of GRID: the validation loss of each."""
    if missing := [name for name in arguments.row if name not in GRID]:
        raise UsageError(f"--sweep has no settings for {', '.join(missing)}", f"--row {' '.join(GRID)}")
    found = [(own, bench.run(name, own)) for name in arguments.row for own in GRID[name]]
    lines = [
        [row.name, ", ".join(f"{key} {value}" for key, value in own.items()), f"{row.loss:.4f}"] for own, row in found
    ]
    _table(["row", "settings", "validation loss"], lines, argparse.Namespace(arguments=arguments))  # type: ignore[arg-type]
    return [row for _, row in found]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="NAME", help="default: all")
    parser.add_argument("--steps", type=int, default=18_000, help="of a worker, with batches of --batch-size")
    parser.add_argument("--ddp-steps", type=int, default=22, help="of fsa and ddp")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8, help="of a worker")
    parser.add_argument("--lr", type=float, help="of the rows' optimizers; default: each row's own")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", default="20mbit", help="of each party's link; '' is no limit")
    parser.add_argument("--rtt", default="80ms", help="round trip between parties; '' is no delay")
    parser.add_argument(
        "--keep-windows", action="store_true", help="net.ipv4.tcp_slow_start_after_idle=0: see docs/how-to/sites.md"
    )
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which a job is stopped")
    parser.add_argument("--sweep", action="store_true", help=sweep.__doc__)
    parser.add_argument("--json", action="store_true", help="print one object")
    return parser.parse_args()


def main() -> int:
    """Run the requested measurement."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process of a job is left behind
    arguments = _arguments()

    def measure() -> list[dict[str, Any]]:
        fetch.ensure("austen")
        with contextlib.ExitStack() as stack:
            wan: Any = None
            if arguments.rate or arguments.rtt:
                wan = stack.enter_context(Wan(SITES, arguments.rate or None, arguments.rtt or None))
                if arguments.keep_windows:
                    wan.keep_windows()
                test = wan.self_test()
                print("\n".join(test.lines()), file=sys.stderr, flush=True)
                test.check()
            rows = (sweep if arguments.sweep else table)(Bench(arguments, wan), arguments)
        return [asdict(row) for row in rows]

    return conclude(measure, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
