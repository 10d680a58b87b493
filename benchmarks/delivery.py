"""Measures how much of the exchange of gradients the next step's forward pass hides, over emulated links (root).

    python benchmarks/delivery.py --rate 200mbit --rtt 30ms --model resnet50 vgg19 --megabytes 50

Layers sleep for their part of the published time of the model (delivery_layers.py), scaled so that the whole exchange
takes --ratio times as long as both passes. For each ratio: a step with --no-p3 and with --p3 (geomx_cli.torch), and of
the same model with MXNet's KVStore: ours, and MXNet's own. Without P3 a step takes at least forward +
max(backward, exchange), with it max(forward + backward, exchange): the quotient bounds what P3 gains. The exchange is
measured alone, without computing. --systems chooses among p3, plain, store and mxnet; --torch names a Python that has
PyTorch.

    python benchmarks/delivery.py --spoke 20mbit --rate 200mbit --rtt 30ms

measures --tsengine inter instead: seconds of an exchange, without computing, of three parties, all of which have links
to each other and to the central one; that of the first party to the central one has the rate --spoke, all others have
--rate. It needs no root: the processes emulate these links. --compress: with this codec.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivery_layers import MODELS
from outcome import conclude
from pushpull_job import HERE, Command, mxnet_cluster, planned
from tensors import LISTS
from wan import Wan

from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.options import Value
from geomx_cli.core.units import parse_duration, parse_rate
from geomx_cli.inventory import WanLink
from geomx_cli.plan import Process

WORKER = str(HERE / "delivery_worker.py")
EXCHANGES = str(HERE / "pushpull_worker.py")
LIMIT = 400.0  # seconds


@dataclass(frozen=True)
class Bench:
    """What all runs share. torch: the Python that has it."""

    model: str
    megabytes: float
    torch: str
    topology: str
    warm_up: int
    iterations: int
    wan: Wan

    def steps(self, system: str, passes: list[tuple[float, float]]) -> list[float]:
        """Seconds of a step with passes of each of these lengths (forward, backward) in seconds."""
        pairs = [f"{forward}:{backward}" for forward, backward in passes]
        words = [self.model, self.megabytes, self.warm_up, self.iterations, *pairs]
        script = (WORKER, "torch" if system in ("p3", "plain") else "mxnet", *map(str, words))
        with tempfile.TemporaryDirectory(prefix="gxd") as directory, contextlib.ExitStack() as stack:
            marks = marks_of(self._commands(system, script, Path(directory)), Path(directory), self.wan, stack)
        ends = [[(mark["start"], mark["end"]) for mark in worker] for worker in marks]
        return [
            (max(end for _, end in each) - max(start for start, _ in each)) / self.iterations
            for each in zip(*ends, strict=True)
        ]

    def _commands(self, system: str, script: tuple[str, ...], directory: Path) -> list[Command]:
        if system == "mxnet":
            servers = "AB" if self.topology == "spread" else "C"
            return mxnet_cluster([sys.executable, *script], 2, 1, self.wan, servers=servers)
        options: dict[str, Value] = {
            "parties": 2, "workers": 1, "topology": self.topology, "rank_scope": "global", "p3": system != "plain",
        }  # fmt: skip
        python = self.torch if system in ("p3", "plain") else sys.executable
        return [
            (item.role, site, argv, env)
            for item, site, argv, env in planned(options, directory, self.wan, ("python", *script), python=python)
        ]


def marks_of(
    commands: list[Command], directory: Path, wan: Wan | None, stack: contextlib.ExitStack
) -> list[list[dict[str, float]]]:
    """Run a job, and return what each of its workers has printed."""
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
    running = []
    for index, (role, site, argv, env) in enumerate(commands):
        out, errors = directory / f"{index}.out", directory / f"{index}.err"
        popen = subprocess.Popen(
            wan.command(site, argv) if wan is not None else argv, text=True, env={**clean, **env},
            stdout=out.open("w"), stderr=errors.open("w"), cwd=directory, start_new_session=True,
        )  # fmt: skip
        stack.callback(_end, popen)
        running.append((role, popen, out, errors))
    workers = [item for item in running if item[0] == "worker"]
    end = time.monotonic() + LIMIT
    while any(popen.poll() is None for _, popen, _, _ in workers) and time.monotonic() < end:
        if any(popen.poll() for _, popen, _, _ in running):
            break
        time.sleep(0.1)
    if any(popen.poll() != 0 for _, popen, _, _ in workers):
        tails = "\n".join(f"{role}: {errors.read_text()[-800:]}" for role, _, _, errors in running)
        raise TrainingFailed(f"the run failed:\n{tails}")
    return [[json.loads(line) for line in out.read_text().splitlines()] for _, _, out, _ in workers]


def period(marks: list[list[dict[str, float]]]) -> float:
    """Seconds from the first start to the last end."""
    found = [mark for worker in marks for mark in worker]
    return max(mark["end"] for mark in found if "end" in mark) - min(mark["start"] for mark in found if "start" in mark)


def _end(popen: "subprocess.Popen[str]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, 9)
    popen.wait()


def _rows(bench: Bench, systems: list[str], ratios: list[float]) -> list[dict[str, Any]]:
    model = MODELS[bench.model]
    first = "plain" if "plain" in systems else systems[0]
    (exchange,) = bench.steps(first, [(0.0, 0.0)])
    share = model.forward / (model.forward + model.backward)
    passes = [(exchange / ratio * share, exchange / ratio * (1 - share)) for ratio in ratios]
    found = {name: bench.steps(name, passes) for name in systems}
    rows = []
    for index, (ratio, (forward, backward)) in enumerate(zip(ratios, passes, strict=True)):
        limits = forward + max(backward, exchange), max(forward + backward, exchange)
        rows.append({
            "model": bench.model, "ratio": ratio, "exchange": exchange, "forward": forward, "backward": backward,
            "bound": limits[0] / limits[1], "limits": limits,
            "seconds": {name: times[index] for name, times in found.items()},
        })  # fmt: skip
        _show(rows[-1])
    return rows


def _show(row: dict[str, Any]) -> None:
    found = row["seconds"]
    print("{model}, ratio {ratio:g}: exchange {exchange:.2f} s, passes {forward:.2f} + {backward:.2f} s".format(**row))
    for name, took in found.items():
        print(f"  {name:6} {took:6.2f} s a step")
    if {"p3", "plain"} <= found.keys():
        gain, possible = found["plain"] / found["p3"], row["bound"] - 1
        share = f"{(gain - 1) / possible:.0%} of what is possible" if possible > 0.01 else "nothing to gain"
        print(f"  p3 gains {gain:.2f} x; the bound is {row['bound']:.2f} x: {share}")
    for ours in ("p3", "store"):
        if {ours, "mxnet"} <= found.keys():
            print(f"  {ours} against MXNet's dist_sync: {found['mxnet'] / found[ours] - 1:+.0%} steps a second")
    sys.stdout.flush()


def _spoke(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of an exchange over a star with one slow spoke, of each run, without TSEngine and with."""
    script = ("python", EXCHANGES, "client", given.tensors, str(given.warm_up), str(given.iterations))
    found: dict[str, list[float]] = {"direct": [], "tsengine": []}
    for _ in range(given.runs):
        for name, mode in (("direct", ""), ("tsengine", "inter")):
            options: dict[str, Value] = {
                "parties": 3, "workers": 1, "rank_scope": "global", "tsengine": mode, "topology": "central",
                "compress": given.compress,
            }  # fmt: skip
            with tempfile.TemporaryDirectory(prefix="gxd") as folder, contextlib.ExitStack() as stack:
                commands = _star(given, planned(options, Path(folder), None, script))
                found[name].append(period(marks_of(commands, Path(folder), None, stack)) / given.iterations)
    middle = {name: statistics.median(times) for name, times in found.items()}
    for name, times in found.items():
        print(f"{name:8} {middle[name]:6.2f} s an exchange ({', '.join(f'{each:.2f}' for each in times)})")
    print(f"tsengine is {middle['direct'] / middle['tsengine']:.2f} x as fast")
    about = {name: getattr(given, name) for name in ("compress", "tensors", "spoke", "rate", "rtt")}
    return [{**about, "seconds": found}]


def _star(given: argparse.Namespace, laid: list[tuple[Process, str, list[str], dict[str, str]]]) -> list[Command]:
    """The processes with emulated links."""
    slow, hub, *others = "A", "central", "B", "C"
    delay = parse_duration(given.rtt) / 2
    links = " ".join(
        WanLink(
            source=one, target=other, delay=delay,
            rate=parse_rate(given.spoke if {one, other} == {slow, hub} else given.rate),
        ).text
        for one in (slow, hub, *others) for other in (slow, hub, *others) if one != other
    )  # fmt: skip
    return [(item.role, site, argv, env | {"GEOMX_LINKS": links}) for item, site, argv, env in laid]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=sorted(MODELS), default=["resnet50"])
    parser.add_argument("--megabytes", type=float, default=50.0, help="of the scaled model; 0: as large as it is")
    parser.add_argument("--systems", nargs="+", choices=("plain", "p3", "store", "mxnet"), default=["plain", "p3"])
    parser.add_argument("--ratio", nargs="+", type=float, default=[0.8, 1.0, 1.5])
    parser.add_argument("--spoke", help="the rate of one party's link; measures --tsengine instead")
    parser.add_argument("--compress", default="", help="with --spoke")
    parser.add_argument("--tensors", choices=sorted(LISTS), default="resnet18", help="with --spoke")
    parser.add_argument("--runs", type=int, default=3, help="with --spoke")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rtt", default="30ms")
    parser.add_argument("--topology", choices=("central", "spread"), default="spread")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--torch", default=str(HERE.parent / ".venv-torch" / "bin" / "python"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _layers(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all models and ratios."""
    results = []
    with Wan(sites=("C", "A", "B"), rate=given.rate, rtt=given.rtt) as wan:
        for name in given.model:
            common = (name, given.megabytes, given.torch, given.topology, given.warm_up, given.iterations, wan)
            results += _rows(Bench(*common), given.systems, given.ratio)
    return results


def main() -> int:
    """Measure all models and ratios, or TSEngine."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that no process of a job is left behind
    given = _arguments()
    print(f"{os.cpu_count()} cores", file=sys.stderr)
    return conclude(lambda: _spoke(given) if given.spoke else _layers(given), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
