"""Measures the exchange of a whole model: every worker pushes all tensors and waits for all results.

    python benchmarks/pushpull.py --topology flat central --system client mxnet --repeat 3     loopback, against MXNet
    python benchmarks/pushpull.py --topology central spread --rate 200mbit --iterations 5      emulated links (root)
    python benchmarks/pushpull.py --topology central --rate 200mbit --global-servers 4 --server-hosts 4
    python benchmarks/pushpull.py --saving off on --repeat 5      what it costs that servers save each round

Prints time per iteration (wall period over all workers), its ratio to the wire limit, bytes per link, CPU seconds per
iteration and peak memory per role, as a table, or with --json as one object. The wire limit is the payload of the
busiest link, encoded if --set compress=SPEC, divided by the goodput of plain TCP in both directions at once, measured
in the same run.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from outcome import conclude
from pushpull_job import MOST_PARTIES, Case, central_sites, letters, mxnet_commands, our_commands
from pushpull_worker import gradients
from tensors import LISTS
from wan import Wan

from geomx_cli.contract.codecs import complete_spec
from geomx_cli.core import plugins
from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.options import decode
from geomx_cli.ps.aggregation.codec import codec_at, parse_codec

MEMORY = "/dev/shm"
"""Where processes save their state, as under an agent."""


@dataclass
class Running:
    """One process of the job: its output, its CPU seconds at the start and the end, the peaks of its own memory and of
    what it saves.
    """

    role: str
    popen: subprocess.Popen[str]
    errors: Path
    state: Path | None = None
    said: dict[str, Any] = field(default_factory=dict)
    cpu: list[float] = field(default_factory=list)
    peak: int = 0
    saved: int = 0

    def cpu_now(self) -> float:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(self.popen.pid).cpu_times()
            return float(times.user + times.system)
        return 0.0

    def memory(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/{self.popen.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    self.peak = int(line.split()[1]) * 1024
        if self.state is not None:
            with contextlib.suppress(OSError):
                self.saved = max(self.saved, sum(file.stat().st_blocks * 512 for file in self.state.iterdir()))


def measure(case: Case) -> dict[str, Any]:
    """Run one case and return its figures."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gxb")))
        state = None
        if case.saving == "on":
            state = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gxb", dir=MEMORY)))
        sites = [*central_sites(case.server_hosts), *letters(case.parties)]
        wan = None
        if _wide(case):
            wan = stack.enter_context(Wan(sites=tuple(sites), rate=case.rate or None, rtt=case.rtt or None))
        limit = _goodput(wan)
        processes = _start(case, directory, state, wan, stack)
        figures = _follow(case, processes, wan)
    return {**vars(case), **figures, **_limits(case, figures, limit)}


def _wide(case: Case) -> bool:
    return bool(case.rate or case.rtt)


def _goodput(wan: Wan | None) -> float:
    """Bytes per second of plain TCP in each direction, both directions busy; 0 on loopback."""
    if wan is None:
        return 0.0
    test = wan.self_test()
    test.check()
    print(f"links: {test.wire_goodput * 8e-6:.1f} Mbit/s both ways at once, round trip {test.round_trip * 1e3:.1f} ms,"
          f" the emulation took {test.emulation_cpu:.2f} cores", file=sys.stderr)  # fmt: skip
    return float(test.wire_goodput)


def _start(
    case: Case, directory: Path, state: Path | None, wan: Wan | None, stack: contextlib.ExitStack
) -> list[Running]:
    commands = mxnet_commands(case, wan) if case.system == "mxnet" else our_commands(case, directory, state, wan)
    clean = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
    running: list[Running] = []
    for role, site, command, env in commands:
        argv = wan.command(site, command) if wan is not None else command
        out = subprocess.PIPE if role == "worker" else subprocess.DEVNULL
        errors = directory / f"errors{len(running)}"
        with errors.open("w") as err:
            popen = subprocess.Popen(
                argv, env={**clean, **env}, stdout=out, stderr=err, text=True, start_new_session=True, cwd=directory
            )
        stack.callback(_end, popen)
        running.append(Running(role, popen, errors, Path(env["GEOMX_STATE_DIR"]) if state is not None else None))
    return running


def _end(popen: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(popen.pid, 9)
    popen.wait()


def _follow(case: Case, processes: list[Running], wan: Wan | None) -> dict[str, Any]:
    """Read the workers' output; sample CPU and links when the first starts and when the last ends."""
    workers = [item for item in processes if item.role == "worker"]
    marks: dict[str, Any] = {}
    lock = threading.Lock()

    def read(item: Running) -> None:
        assert item.popen.stdout is not None
        for line in item.popen.stdout:
            with contextlib.suppress(ValueError):
                item.said |= json.loads(line)
            with lock:
                started = sum("start" in other.said for other in workers)
                ended = sum("end" in other.said for other in workers)
                if started == 1 and not marks.get("started"):
                    marks["started"] = _sample(processes, wan)
                if ended == len(workers) and not marks.get("ended"):
                    marks["ended"] = _sample(processes, wan)

    threads = [threading.Thread(target=read, args=(item,), daemon=True) for item in workers]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 900
    while any(item.popen.poll() is None for item in workers) and time.monotonic() < end:
        for item in processes:
            item.memory()
        if any(item.popen.poll() for item in processes):
            break
        time.sleep(0.05)
    failed = [f"{item.role}: {item.popen.poll()}" for item in workers if item.popen.wait(5) or "end" not in item.said]
    if failed:
        tails = "\n".join(item.errors.read_text()[-800:] for item in processes)
        raise TrainingFailed(f"the run failed ({', '.join(failed)}):\n{tails}")
    for thread in threads:
        thread.join(5)
    return _figures(case, processes, workers, marks)


def _sample(processes: list[Running], wan: Wan | None) -> Any:
    for item in processes:
        item.cpu.append(item.cpu_now())
    return wan.bytes() if wan is not None else {}


def _figures(case: Case, processes: list[Running], workers: list[Running], marks: dict[str, Any]) -> dict[str, Any]:
    period = max(item.said["end"] for item in workers) - min(item.said["start"] for item in workers)
    cpu: defaultdict[str, float] = defaultdict(float)
    memory: defaultdict[str, int] = defaultdict(int)
    saved: defaultdict[str, int] = defaultdict(int)
    for item in processes:
        if len(item.cpu) == 2:
            cpu[item.role] += (item.cpu[1] - item.cpu[0]) / case.iterations
        memory[item.role] = max(memory[item.role], item.peak)
        saved[item.role] = max(saved[item.role], item.saved)
    links = {
        site: {way: (marks["ended"][site][way] - count) / case.iterations for way, count in ways.items()}
        for site, ways in marks["started"].items()
    }
    return {
        "seconds": period / case.iterations,
        "cpu_seconds": dict(cpu),
        "peak_bytes": dict(memory),
        "saved_bytes": dict(saved),
        "link_bytes": links,
    }


def _limits(case: Case, figures: dict[str, Any], goodput: float) -> dict[str, Any]:
    """The wire limit, and bytes on the busiest link beyond the payload (as Ethernet frames, headers included)."""
    model = _encoded_bytes(case)
    members = case.workers if case.system == "mxnet" else 1  # members of a party that send to the servers
    central = max(1.0, case.parties / case.server_hosts)
    copies = {"central": central, "spread": 2 * members * (case.parties - 1) / case.parties}.get(
        case.topology, case.parties * case.workers
    )
    if not goodput:
        return {"model_bytes": model}
    limit = copies * model / goodput
    ratio = figures["seconds"] / limit
    return {"model_bytes": model, "limit_seconds": limit, "ratio": ratio, "payload_bytes": copies * model}


def _encoded_bytes(case: Case) -> int:
    """Bytes of a party's sum in one direction."""
    sizes = LISTS[case.tensors]
    spec = complete_spec(str(case.options.get("compress", "")), 1000)
    sent = 0
    for array in gradients(0, sizes):
        codec = codec_at(parse_codec(spec), len(array), 1 << 20)
        sent += array.nbytes if codec is None else len(codec.encode(array))
    return sent


def described(result: dict[str, Any]) -> str:
    """The result as lines of text."""
    title = "{system} {topology} {tensors}, {parties} x {workers} workers, saving {saving}".format(**result)
    lines = [f"{title}: {result['seconds'] * 1e3:.1f} ms per iteration, {os.cpu_count()} cores"]
    if "ratio_to_mxnet" in result:
        lines.append(f"  {result['ratio_to_mxnet']:.2f} x the time of MXNet's dist_sync, the best run here")
    if "ratio" in result:
        lines.append(f"  wire limit {result['limit_seconds'] * 1e3:.1f} ms, ratio {result['ratio']:.3f}")
    for site, ways in result["link_bytes"].items():
        lines.append(f"  link {site}: sent {ways['sent'] / 1e6:.2f} MB, received {ways['received'] / 1e6:.2f} MB")
    for role, seconds in result["cpu_seconds"].items():
        lines.append(
            f"  {role:17} {seconds * 1e3:8.1f} ms CPU  peak {result['peak_bytes'][role] / 1e6:7.1f} MB"
            f"  saved {result['saved_bytes'][role] / 1e6:6.1f} MB"
        )
    return "\n".join(lines)


def _options(given: list[str]) -> dict[str, Any]:
    table = {option.name: option for option in plugins.table()}
    pairs = (item.partition("=") for item in given)
    return {name: decode(table[name], text) for name, _, text in pairs}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", choices=("client", "store", "mxnet"), default=["client"])
    parser.add_argument("--topology", nargs="+", choices=("flat", "central", "spread"), default=["flat"])
    parser.add_argument("--saving", nargs="+", choices=("off", "on"), default=["off"], help="of each round's state")
    parser.add_argument("--tensors", choices=sorted(LISTS), default="resnet18")
    for name, value in {"parties": 2, "workers": 2, "global-servers": 1, "local-servers": 1, "server-hosts": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case, in turn; the median counts")
    parser.add_argument("--rate", default="", help="of each party's link, as 200mbit")
    parser.add_argument("--rtt", default="", help="round trip between parties, as 30ms")
    parser.add_argument("--set", dest="options", nargs="+", default=[], metavar="OPTION=VALUE", help="of geomx launch")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not 1 <= arguments.parties <= MOST_PARTIES:
        parser.error(f"--parties {arguments.parties}: from 1 to {MOST_PARTIES}")
    return arguments


def _cases(arguments: dict[str, Any]) -> list[Case]:
    """Every system with every topology, without and with saving. MXNet's own store supports only the flat one, with its
    servers at C, or for "spread" in the parties.
    """
    systems, topologies, saving = (arguments.pop(name) for name in ("system", "topology", "saving"))
    ours = [system for system in systems if system != "mxnet"]
    found = [
        Case(system=system, topology=topology, saving=whether, **arguments)
        for system in ours for topology in topologies for whether in saving
    ]  # fmt: skip
    if "mxnet" in systems:
        placed = ["spread" if topology == "spread" else "flat" for topology in topologies]
        found += [Case(system="mxnet", topology=topology, **arguments) for topology in dict.fromkeys(placed)]
    return found


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time, and all times."""
    ordered = sorted(runs, key=lambda run: float(run["seconds"]))
    return {**ordered[(len(ordered) - 1) // 2], "all_seconds": [run["seconds"] for run in runs]}


def main() -> int:
    """Measure each case the requested number of times."""
    arguments = vars(_arguments())
    as_json, repeat = arguments.pop("json"), arguments.pop("repeat")

    def compare() -> list[dict[str, Any]]:
        arguments["options"] = _options(arguments["options"])
        cases = _cases(arguments)
        turns = [[measure(case) for case in cases] for _ in range(repeat)]
        results = [_median(list(runs)) for runs in zip(*turns, strict=True)]
        others = [result["seconds"] for result in results if result["system"] == "mxnet"]
        return [result | ({"ratio_to_mxnet": result["seconds"] / min(others)} if others else {}) for result in results]

    return conclude(compare, as_json=as_json, show=lambda results: print(*map(described, results), sep="\n"))


if __name__ == "__main__":
    sys.exit(main())
