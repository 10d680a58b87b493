"""Measures the memory of a worker whose script never waits: MXNet's own dist_sync, and ours, flat and in two levels.

    python benchmarks/worker_memory.py                       ResNet-18 of gluon's zoo, 40 steps
    python benchmarks/worker_memory.py --system mxnet flat --steps 100

The same script (worker_memory_script.py) runs on two workers each time: with MXNet's scheduler, server and workers, as
a flat job, and as two parties of one worker with a global server in a central party. Prints the peak of resident memory
of the largest worker, its ratio to MXNet's, and seconds per step, as a table or with --json as one object.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcome import conclude
from pushpull_job import Command, mxnet_cluster, planned

from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.options import Value

HERE = Path(__file__).parent
SYSTEMS = ("mxnet", "flat", "central")
WORKERS = 2


def measure(system: str, script: list[str], steps: int, limit: float) -> dict[str, Any]:
    """Run the script on one system and return its figures."""
    with tempfile.TemporaryDirectory(prefix="gxb") as folder, contextlib.ExitStack() as stack:
        directory = Path(folder)
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
        workers = []
        for number, (role, _, argv, env) in enumerate(_commands(system, script, directory)):
            log = stack.enter_context((directory / f"log{number}").open("w+"))
            popen = subprocess.Popen(
                argv, env={**clean, **env}, stdout=log, stderr=log, start_new_session=True, cwd=directory
            )
            stack.callback(_end, popen)
            if role == "worker":
                workers.append((popen, Path(log.name)))
        said = [_said(popen, log, limit) for popen, log in workers]
    peak = max(one["peak"] for one in said)
    seconds = max(one["seconds"] for one in said) / max(1, steps - 1)
    return {"system": system, "peak_bytes": peak, "seconds": seconds, "weights": said[0]["weights"]}


def _commands(system: str, script: list[str], directory: Path) -> list[Command]:
    if system == "mxnet":
        return mxnet_cluster([sys.executable, *script], WORKERS, 1, None)
    options: dict[str, Value] = {"topology": system, "parties": WORKERS, "workers": 1}
    return [
        ("master" if item.role == "worker" and item.global_rank is None else item.role, site, argv, env)
        for item, site, argv, env in planned(options, directory, None, ("python", *script))
    ]


def _said(popen: subprocess.Popen[bytes], log: Path, limit: float) -> dict[str, Any]:
    """The object that a worker printed at its end."""
    try:
        popen.wait(limit)
    except subprocess.TimeoutExpired:
        raise TrainingFailed(f"a worker still runs after {limit:g} s", "give --limit, or fewer --steps") from None
    lines = log.read_text().splitlines()
    found = [line for line in lines if line.startswith("{")]
    if popen.returncode or not found:
        raise TrainingFailed("a worker failed:\n" + "\n".join(lines[-15:]))
    said: dict[str, Any] = json.loads(found[-1])
    return said


def _end(popen: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, 9)
    popen.wait()


def show(results: Sequence[dict[str, Any]]) -> None:
    """Print the results as a table."""
    stock = next((one["peak_bytes"] for one in results if one["system"] == "mxnet"), 0)
    for one in results:
        ratio = f"  {one['peak_bytes'] / stock:5.2f} x MXNet's" if stock else ""
        figures = f"peak {one['peak_bytes'] / 1e6:7.1f} MB  {one['seconds'] * 1e3:7.1f} ms per step"
        print(f"{one['system']:8} {figures}{ratio}")


def main() -> int:
    """Measure each system in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--network", default="resnet18_v1", help="of gluon's model zoo")
    for name, value in {"image-size": 32, "batch": 8, "steps": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--limit", type=float, default=900, help="seconds for each system")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    script = [str(HERE / "worker_memory_script.py"), given.network]
    script += [str(number) for number in (given.image_size, given.batch, given.steps)]

    def compare() -> list[dict[str, Any]]:
        return [measure(system, script, given.steps, given.limit) for system in given.system]

    return conclude(compare, as_json=given.json, show=show)


if __name__ == "__main__":
    sys.exit(main())
