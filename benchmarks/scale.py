"""Measures how long training stands still when `geomx scale` gives a running job other numbers.

    python benchmarks/scale.py          2 x 2 becomes 3 x 1, with numpy and with MXNet
    python benchmarks/scale.py --json   one object

The jobs train by fsa on Fashion-MNIST on this machine: `linear` in numpy, and `cnn` in MXNet. The pause is the time
from the last round of the old job to the first round of the new one, as worker 0 of party A has logged them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcome import conclude

from geomx_cli.core.errors import CheckFailed

GEOMX = (sys.executable, "-m", "geomx_cli")
NETWORKS = {"linear": ("--network", "linear"), "cnn": ("--network", "cnn", "--framework", "mxnet")}
BEFORE, AFTER = 10, 3  # rounds
LIMIT = 180.0  # seconds for these rounds


def measure(repeats: int) -> list[dict[str, Any]]:
    """A row for each network and repeat."""
    return [_row(network) for network in NETWORKS for _ in range(repeats)]


def _row(network: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as base:
        old, new = Path(base) / "old", Path(base) / "new"
        words = [*NETWORKS[network], "--algo", "fsa", "--epochs", "100", "--parties", "2", "--workers", "2"]
        try:
            _geomx("launch", "--local", "--detach", "--job-dir", str(old), *words)
            _rounds(old, BEFORE)
            began = time.time()
            _geomx("scale", str(old), "--parties", "3", "--workers", "1", "--detach", "--job-dir", str(new))
            first = _rounds(new, AFTER)[0]
        finally:
            for folder in (old, new):
                subprocess.run([*GEOMX, "stop", str(folder)], capture_output=True, check=False, timeout=LIMIT)
        last = _rounds(old, BEFORE)[-1]
        return {"network": network, "pause_s": first - last, "command_to_first_round_s": first - began}


def _geomx(*words: str) -> None:
    ended = subprocess.run([*GEOMX, *words], capture_output=True, text=True, check=False, timeout=LIMIT)
    if ended.returncode:
        raise CheckFailed(f"geomx {words[0]} ended with status {ended.returncode}: {ended.stderr[-500:]}")


def _rounds(folder: Path, count: int) -> list[float]:
    """Wait until worker 0 of party A has logged so many rounds; return when, in seconds since 1970."""
    path, limit = folder / "events" / "A-worker-0.jsonl", time.monotonic() + LIMIT
    while time.monotonic() < limit:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        events = [json.loads(line) for line in lines if '"event": "round"' in line and line.endswith("\n")]
        if len(events) >= count:
            return [event["time"] for event in events]
        time.sleep(0.05)
    raise CheckFailed(f"no {count} rounds in {folder} within {LIMIT:g} s")


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a line for each row."""
    for row in rows:
        print(
            f"{row['network']:8}pause {row['pause_s']:5.2f} s"
            f"   from the command to the first round {row['command_to_first_round_s']:5.2f} s"
        )


def main() -> int:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return conclude(lambda: measure(given.repeats), as_json=given.json, show=show)


if __name__ == "__main__":
    sys.exit(main())
