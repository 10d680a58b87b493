"""Measures HF's Trainer and Lightning's with one line, over slow links: DiLoCo with sparseloco, and DDP.

    .venv-frameworks/bin/python benchmarks/frameworks.py
    .venv-frameworks/bin/python benchmarks/frameworks.py --framework hf --steps 600 --inner-steps 20

A GPT-2 of 0.1 million parameters, on texts of a Markov chain; 2 parties with one worker each, whose links are shaped by
`geomx launch --wan`. Rows of each framework:

    single      one process, without links: the same samples, in batches of both workers together
    diloco      --algo diloco --compress sparseloco, by geomx.hf.Callback() or geomx.lightning.Strategy()
    ddp         --algo fsa, DistributedDataParallel: the steps of `single` at the links' pace, so only --ddp-steps;
                seconds and bytes are those of as many more

Prints the loss on held-out texts after the last step, seconds of training with the evaluation at its end, and the bytes
over the parties' links, in both directions.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outcome import conclude
from time_to_accuracy import _table

from geomx_cli.core.errors import CheckFailed

WORKERS = 2
SCRIPT = str(Path(__file__).with_name("frameworks_script.py"))


@dataclass
class Result:
    """loss: None if not trained to the end."""

    framework: str
    row: str
    loss: float | None
    seconds: float
    wan_bytes: float


def measure(framework: str, row: str, given: argparse.Namespace) -> Result:
    """Run one row. Raises CheckFailed if it fails."""
    steps = given.ddp_steps if row == "ddp" else given.steps
    batch = given.batch_size * (WORKERS if row == "single" else 1)
    with tempfile.TemporaryDirectory(prefix="gxf") as folder:
        own = Path(folder, "result.json")
        script = [SCRIPT, framework, str(steps), str(batch), str(given.lr), str(own)]
        if row == "single":
            _run([sys.executable, *script], folder)
            found = json.loads(own.read_text())
            return Result(framework, row, found["loss"], found["seconds"], 0.0)
        diloco = f"--algo diloco --compress sparseloco --inner-steps {given.inner_steps} --outer-lr {given.outer_lr}"
        options = (diloco if row == "diloco" else "--algo fsa").split()
        launch = f"launch --local --json --timeout 10m --topology spread --parties {WORKERS} --workers 1"
        job = ["--wan", given.wan, "--job-dir", str(Path(folder, "job"))]
        argv = [sys.executable, "-m", "geomx_cli", *launch.split(), *options, *job]
        result = json.loads(_run([*argv, "--", "python", *script, "line"], folder))
        sent = float(sum(result["bytes"]["wan"]))
        if row == "diloco":
            return Result(framework, row, json.loads(own.read_text())["loss"], result["training_s"], sent)
        factor = given.steps / steps
        return Result(framework, row, None, result["training_s"] * factor, sent * factor)


def _run(argv: list[str], folder: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(f"{' '.join(argv[:8])} ... failed: {done.stderr[-2000:]}")
    return done.stdout


def table(given: argparse.Namespace) -> list[Result]:
    """Run every row once and print them beside each other."""
    found: list[Result] = []
    lines = []
    for framework in given.framework:
        rows = {row: measure(framework, row, given) for row in given.row}
        found += rows.values()
        single, ddp = rows.get("single"), rows.get("ddp")
        for row, one in rows.items():
            more = f"{100 * (one.loss / single.loss - 1):+.2f} %" if one.loss and single and single.loss else "-"
            sent = f"{one.wan_bytes / 1e6:.4g}" if one.wan_bytes else "-"
            less = f"{ddp.wan_bytes / one.wan_bytes:.4g}" if ddp and one.wan_bytes else "-"
            loss = f"{one.loss:.4f}" if one.loss is not None else "-"
            lines.append([framework, row, loss, more, f"{one.seconds:.0f}", sent, less])
    heads = ["framework", "row", "loss", "to one process", "s", "WAN MB", "ddp's / its"]
    _table(heads, lines, argparse.Namespace(arguments=given))  # type: ignore[arg-type]
    return found


def main() -> int:
    """Run the requested measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    frameworks, rows = ["hf", "lightning"], ["single", "diloco", "ddp"]
    parser.add_argument("--framework", nargs="+", choices=frameworks, default=frameworks)
    parser.add_argument("--row", nargs="+", choices=rows, default=rows)
    parser.add_argument("--steps", type=int, default=2400, help="of a worker")
    parser.add_argument("--ddp-steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=8, help="of a worker")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--inner-steps", type=int, default=10)
    parser.add_argument("--outer-lr", type=float, default=2.0)
    parser.add_argument("--wan", default="20mbit,80ms")
    parser.add_argument("--json", action="store_true", help="print one object")
    arguments = parser.parse_args()

    def run() -> list[dict[str, Any]]:
        return [asdict(row) for row in table(arguments)]

    return conclude(run, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
