"""Kills processes of users' scripts at random, and compares all that each ends with to the same job undisturbed.

    python benchmarks/recovery_scripts.py                             each model with each algorithm, 20 kills each
    python benchmarks/recovery_scripts.py --kills 5 --only gan/diloco     of the rows whose name contains a text
    python benchmarks/recovery_scripts.py --json                      one object

A job has two parties of one worker on this machine. Its script (recovery_torch.py or recovery_mxnet.py) saves its
training by `geomx.state`, or by `geomx.fit`. The models, in the environment with PyTorch:

    cnn       a classifier of images           gan       two models with an optimizer each
    lm        a language model

and in the one with MXNet:

    trainer   a gluon Trainer                  module    Module.fit

Workers and servers are killed, in the ways of recovery.py, up to --each in one job; jobs follow until a row has its
kills. A row is right if in each job the weights, the optimizers, the learning rate and the indices of all samples in
their order have the bits of the undisturbed job, in each worker.
"""

import argparse
import importlib.util
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from outcome import conclude
from recovery import Disturbed, Killing, Outcome

from geomx_cli.core.errors import CheckFailed

MODELS = {"cnn": "torch", "lm": "torch", "gan": "torch", "trainer": "mxnet", "module": "mxnet"}
"""The framework of each."""
ALGORITHMS = {
    "fsa": "--algo fsa", "hfa": "--algo hfa --k1 2 --k2 2", "diloco": "--algo diloco --inner-steps 4",
}  # fmt: skip
ROLES, GAPS = "worker|server", (0.2, 3.0)
EPOCHS, PAUSE = 10, 0.03
_WORKERS = 2  # that train
_LINES = 20  # of launch's output, if a job fails


class DisturbedScript(Disturbed):
    """A job of a script; its options are a model and those of an algorithm. Kills begin when all workers train."""

    def _job(self) -> list[str]:
        model, *options = self.options
        script = Path(__file__).with_name(f"recovery_{MODELS[model]}.py")
        words = ["--local", "--parties", "2", "--workers", "1", "--framework", MODELS[model], *options]
        if MODELS[model] == "mxnet":
            words += ["--rank-scope", "global" if "fsa" in options else "party"]  # hfa needs the latter
        return [*words, "--", sys.executable, str(script), model, str(EPOCHS), str(PAUSE)]

    def _has_begun(self) -> bool:
        logs = [path.read_text() for path in self.folder.glob("events/*worker*.jsonl")]
        return sum('"reported"' in log for log in logs) == _WORKERS

    def _outcome(self, status: int, kills: list[Killing], output: str) -> Outcome:
        found = {path.parent.name: path.read_text() for path in self.folder.glob("outputs/*/found.json")}
        return Outcome(status, found, {}, [], kills, output)


def played(name: str, folder: Path, seed: int, kills: int) -> Outcome:
    """Run a job of a row."""
    model, algorithm = name.split("/")
    options = [model, *ALGORITHMS[algorithm].split()]
    return DisturbedScript(folder, options, ROLES, Random(f"{name} {seed}"), GAPS).play(kills)


def measure(names: Sequence[str], kills: int, each: int, seed: int, *, show: bool) -> list[dict[str, Any]]:
    """Kill processes in each row. Raises CheckFailed if an undisturbed job fails."""
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory() as base:
            begun = time.monotonic()
            calm = played(name, Path(base, "calm"), seed, 0)
            if calm.status or len(calm.weights) != _WORKERS:
                raise CheckFailed(f"{name}: the undisturbed job ended with status {calm.status}", _end_of(calm))
            row: dict[str, Any] = {"row": name, "kills": 0, "jobs": 0, "wrong": []}
            for number in itertools.count():
                if row["kills"] >= kills:
                    break
                count = min(each, kills - row["kills"])
                _add_job(row, played(name, Path(base, str(number)), seed * 1000 + number, count), calm, number)
            row["seconds"] = round(time.monotonic() - begun, 1)
        rows.append(row)
        if show:
            _show(row)
    return rows


def _add_job(row: dict[str, Any], outcome: Outcome, calm: Outcome, number: int) -> None:
    row["kills"] += len(outcome.kills)
    row["jobs"] += 1
    why = _differs(outcome, calm)
    if why:
        died = ", ".join(f"{kill.process} {kill.kind}" for kill in outcome.kills)
        row["wrong"].append(f"job {number} ({died}): {why}")
        print(f"{row['row']}: {row['wrong'][-1]}\n{_end_of(outcome)}", file=sys.stderr, flush=True)
    if not outcome.kills:
        raise CheckFailed(f"{row['row']}: the job ended before a process was killed", "raise EPOCHS or PAUSE")


def _differs(outcome: Outcome, calm: Outcome) -> str:
    """What is wrong with a disturbed job; "" for nothing."""
    if outcome.status:
        return f"ended with status {outcome.status}"
    if set(outcome.weights) != set(calm.weights):
        return f"only {', '.join(outcome.weights) or 'no worker'} has ended"
    pairs = [(worker, json.loads(calm.weights[worker]), json.loads(outcome.weights[worker])) for worker in calm.weights]
    other = [f"{name} of {worker}" for worker, mine, its in pairs for name in mine if mine[name] != its.get(name)]
    return f"other {', '.join(other)}" if other else ""


def _end_of(outcome: Outcome) -> str:
    return "\n".join(outcome.output.splitlines()[-_LINES:])


def _show(row: dict[str, Any]) -> None:
    right = f"{len(row['wrong'])} of {row['jobs']} jobs differ" if row["wrong"] else "same bits"
    died = f"{row['kills']:4} kills in {row['jobs']:2} jobs"
    print(f"{row['row']:18}{died}   {right:24}{row['seconds']:8.1f} s", flush=True)


def main() -> int:
    """Run the rows; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="in each row")
    parser.add_argument("--only", default="", help="of the rows whose name, MODEL/ALGORITHM, contains this text")
    parser.add_argument("--each", type=int, default=5, help="kills in one job")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [(model, f"{model}/{algorithm}") for model in MODELS for algorithm in ALGORITHMS]
    chosen = [(MODELS[model], name) for model, name in rows if given.only in name]
    missing = {framework for framework, _ in chosen if importlib.util.find_spec(framework) is None}
    names = [name for framework, name in chosen if framework not in missing]
    for framework in sorted(missing):
        left = [name for each, name in chosen if each == framework]
        print(f"not here, as {framework} is not installed: {', '.join(left)}", file=sys.stderr)
    found: list[dict[str, Any]] = []

    def run() -> list[dict[str, Any]]:
        found.extend(measure(names, given.kills, given.each, given.seed, show=not given.json))
        return found

    return conclude(run, as_json=given.json) or int(not names or any(row["wrong"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
