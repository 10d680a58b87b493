"""Stops a job in the middle of an epoch, and goes on from it with other numbers of parties and workers.

    python benchmarks/other_numbers.py                               2 x 2, then 3 x 1, 1 x 4 and 2 x 3
    python benchmarks/other_numbers.py --to figure.png               also draws the loss over samples
    python benchmarks/other_numbers.py --json                        one object

The jobs train `linear` by fsa on Fashion-MNIST on this machine, for two epochs. The stop comes after --stop rounds of
the first epoch. "Loss before" and "after" are means over the last and the first WINDOW rounds and all workers. Batches
on a worker are the same, so the number of samples in a round follows from the number of workers.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcome import conclude

from geomx_cli.core.errors import CheckFailed

WINDOW = 50
EPOCHS, SAMPLES = 2, 60_000
TRAINING = ("--network", "linear", "--algo", "fsa", "--seed", "1", "--epochs", str(EPOCHS))
NUMBERS = ((3, 1), (1, 4), (2, 3))
LIMIT = 300.0  # seconds for a job
Point = tuple[int, float]


class Run:
    """A job of `geomx launch`. parties, workers: of each party."""

    def __init__(self, base: Path, name: str, numbers: tuple[int, int], words: Sequence[str]) -> None:
        self.parties, self.workers = numbers
        self.folder = base / name
        shape = ["--parties", str(self.parties), "--workers", str(self.workers)]
        command = [sys.executable, "-m", "geomx_cli", "launch", "--local", "--json", "--job-dir", str(self.folder)]
        self._begun = time.monotonic()
        self._process = subprocess.Popen(
            [*command, *words, *shape], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def stop_after(self, rounds: int) -> None:
        """Stop it as a user does."""
        until = time.monotonic() + LIMIT
        while self._process.poll() is None and time.monotonic() < until and len(self._rounds("A-worker-0")) < rounds:
            time.sleep(0.05)
        self._process.send_signal(signal.SIGTERM)
        self.result(75)

    def result(self, status: int = 0) -> dict[str, Any]:
        """Wait for its end. Raises CheckFailed for another exit status."""
        out, err = self._process.communicate(timeout=LIMIT)
        if self._process.returncode != status:
            raise CheckFailed(f"{self.folder.name} ended with status {self._process.returncode}: {err[-500:]}")
        return dict(json.loads(out.splitlines()[-1]))

    def curve(self, before: int) -> list[Point]:
        """The samples of all workers so far, with `before` of earlier jobs, and the mean loss of each round."""
        names = [path.stem for path in self.folder.glob("events/*worker*.jsonl")]
        losses = defaultdict(list)
        for name in names:
            for event in self._rounds(name):
                if event["loss"] is not None:
                    losses[event["num_iters"]].append((event["num_samples"], event["loss"]))
        curve, samples = [], before
        for _, each in sorted(losses.items()):
            samples += sum(count for count, _ in each)
            curve.append((samples, statistics.fmean(loss for _, loss in each)))
        return curve

    def _rounds(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "events" / f"{name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if '"event": "round"' in line and line.endswith("}")]


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The job that is not stopped, and each that goes on."""
    with tempfile.TemporaryDirectory() as base:
        calm = Run(Path(base), "calm", (2, 2), TRAINING)
        rows = [_row(calm, calm.result(), [])]
        stopped = Run(Path(base), "stopped", (2, 2), TRAINING)
        stopped.stop_after(given.stop)
        before = stopped.curve(0)
        for parties, workers in NUMBERS:
            run = Run(Path(base), f"{parties}x{workers}", (parties, workers), ["--resume", str(stopped.folder)])
            rows.append(_row(run, run.result(), before))
    if given.to:
        _draw(rows, before, given.to)
    return [{name: value for name, value in row.items() if name != "curve"} for row in rows]


def _row(run: Run, result: dict[str, Any], before: list[Point]) -> dict[str, Any]:
    curve = run.curve(before[-1][0] if before else 0)
    trained = sum(one["samples"] for one in result["data"].values())
    return {
        "parties": run.parties, "workers": run.workers, "stopped_at": before[-1][0] if before else None,
        "samples": trained, "due": EPOCHS * SAMPLES, "accuracy": result["accuracy"],
        "loss_before": statistics.fmean(loss for _, loss in before[-WINDOW:]) if before else None,
        "loss_after": statistics.fmean(loss for _, loss in curve[:WINDOW]) if before else None,
        "first_step_s": result["first_step_s"], "curve": curve,
    }  # fmt: skip


def _draw(rows: Sequence[dict[str, Any]], before: list[Point], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    axes = figure.add_subplot()
    calm, *others = rows
    axes.plot(*_smooth(calm["curve"]), color="#94a3b8", linewidth=3, label="2 parties x 2 workers, not stopped")
    axes.plot(*_smooth(before), color="#1c2733", label="2 x 2, stopped in the first epoch")
    for row, colour in zip(others, ("#c2410c", "#1f5f9f", "#0f766e"), strict=True):
        axes.plot(*_smooth(row["curve"]), color=colour, label=f"continued as {row['parties']} x {row['workers']}")
    axes.axvline(before[-1][0], color="#1c2733", linestyle=":", linewidth=1)
    axes.axvline(SAMPLES, color="#dde3ea", linewidth=1)
    axes.set_xlabel(f"samples trained on by all workers (an epoch has {SAMPLES})")
    axes.set_ylabel(f"training loss, mean of {WINDOW} rounds")
    axes.set_ylim(0.35, 0.8)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _smooth(curve: Sequence[Point]) -> tuple[list[int], list[float]]:
    """Samples, and the mean loss of the last WINDOW rounds, or of fewer at the beginning."""
    losses = [loss for _, loss in curve]
    means = [statistics.fmean(losses[max(0, end - WINDOW) : end]) for end in range(1, len(losses) + 1)]
    return [samples for samples, _ in curve], means


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each job."""
    for row in rows:
        print(row)


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stop", type=int, default=60, help="rounds before the stop")
    parser.add_argument("--to", type=Path, help="the file of a figure")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return conclude(lambda: measure(given), as_json=given.json, show=show)


if __name__ == "__main__":
    sys.exit(main())
