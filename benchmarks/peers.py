"""Compares the exchange of a whole model over a WAN with other systems for training across sites. Needs root.

    .venv-torch/bin/python benchmarks/peers.py                                  all systems, both networks
    .venv-torch/bin/python benchmarks/peers.py --network 200mbit, --system geomx-fsa two-level
    .venv-torch/bin/python benchmarks/peers.py --json > peers.json

Two parties of two ranks, the 62 trainable tensors of ResNet-18 (46.8 MB in fp32), nothing to compute. Each system runs
in its best configuration (peers_systems.py, peer_*.py) on the same emulated network (wan.py), in an environment that is
made when it is first needed (peers_environment.py); one that cannot be installed is left out, and the reason printed.
Prints the median time of an exchange, from when all ranks begin to when the last has the result, its ratio to the wire
limit, and bytes on each party's link. The wire limit is one copy of the payload, in the row's precision, divided by the
goodput of plain TCP in both directions at once, measured in the same run. Every result is checked.
"""

import argparse
import contextlib
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from outcome import conclude
from peer_measure import MARK
from peers_environment import interpreter
from peers_systems import PARTIES, SYSTEMS, Member, Setting, System
from tensors import LISTS
from wan import Wan

from geomx_cli.core.errors import CheckFailed, TrainingFailed

NETWORKS = ("200mbit,", "100mbit,50ms")
LIMIT = 180.0
"""Seconds for the start of a system, and for an exchange."""
ENDING = 5.0


class Ranks:
    """The processes of one system. `close` ends them all, also after a `start` that has failed."""

    def __init__(self, wan: Wan, directory: Path) -> None:
        self._heard: list[queue.Queue[str]] = []
        self._running: list[tuple[Member, subprocess.Popen[str], Path]] = []
        self._measured: list[int] = []
        self._directory, self._wan = directory, wan

    def start(self, member: Member) -> None:
        """Start a process."""
        errors = self._directory / f"errors{len(self._running)}"
        clean = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
        env = {**clean, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **member.env}
        with errors.open("w") as log:
            popen = self._wan.popen(
                member.site, member.argv, env=env, cwd=self._directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        if member.measured:
            self._measured.append(len(self._running))
        self._running.append((member, popen, errors))
        self._heard.append(queue.Queue())
        threading.Thread(target=self._read, args=(popen, self._heard[-1]), daemon=True).start()

    def _read(self, popen: subprocess.Popen[str], heard: queue.Queue[str]) -> None:
        assert popen.stdout is not None
        for line in popen.stdout:
            if line.startswith(MARK):
                heard.put(line[len(MARK) :].strip())
        heard.put("")

    def ready(self) -> None:
        """Wait until all ranks can begin an exchange."""
        self._gather()

    def exchange(self) -> tuple[float, float]:
        """When the first rank began, and when the last one had the result."""
        for index in self._measured:
            self._tell(index, "go")
        said = [json.loads(text) for text in self._gather()]
        return min(item["begin"] for item in said), max(item["end"] for item in said)

    def _tell(self, index: int, text: str) -> None:
        pipe = self._running[index][1].stdin
        assert pipe is not None
        with contextlib.suppress(OSError):
            pipe.write(text + "\n")
            pipe.flush()

    def _gather(self) -> list[str]:
        """The next line of each rank. Raises TrainingFailed if one ends, or none comes within the limit."""
        lines, end = [], time.monotonic() + LIMIT
        for index in self._measured:
            try:
                lines.append(self._heard[index].get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                raise TrainingFailed(f"nothing for {LIMIT:g} seconds:\n{self._errors()}") from None
            if not lines[-1]:
                raise TrainingFailed(f"process {index} has ended:\n{self._errors()}")
        return lines

    def _errors(self) -> str:
        tails = [(index, file.read_text(errors="replace")[-1500:]) for index, (*_, file) in enumerate(self._running)]
        return "\n".join(f"-- process {index}\n{text}" for index, text in tails if text.strip())

    def close(self) -> None:
        """Have the ranks end, and kill what is left after some seconds."""
        for index in self._measured:
            self._tell(index, "end")
        end = time.monotonic() + ENDING
        for index in self._measured:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running[index][1].wait(max(0.0, end - time.monotonic()))
        for _, popen, _ in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, 9)
            popen.wait()


def measure(system: System, wan: Wan, arguments: argparse.Namespace, goodput: float) -> dict[str, Any]:
    """Run one system and return its row."""
    python = interpreter(system.environment)
    with tempfile.TemporaryDirectory(prefix="gxp") as folder, contextlib.ExitStack() as stack:
        setting = Setting(wan, python, Path(folder), arguments.tensors)
        ranks = Ranks(wan, Path(folder))
        stack.callback(ranks.close)
        for member in system.commands(setting):
            ranks.start(member)
        ranks.ready()
        times: list[float] = []
        before = wan.bytes()
        for number in range(arguments.warm_up + arguments.iterations):
            if number == arguments.warm_up:
                before = wan.bytes()
            begin, end = ranks.exchange()
            times.append(end - begin)
            ranks.ready()
        after = wan.bytes()
    times = times[arguments.warm_up :]
    links = {
        site: {way: (after[site][way] - count) / len(times) for way, count in before[site].items()}
        for site in wan.sites
    }
    payload = 4 * sum(LISTS[arguments.tensors]) // (2 if system.half else 1)
    seconds, limit = statistics.median(times), payload / goodput
    return {
        "title": system.title, "precision": "fp16" if system.half else "fp32", "encrypted": system.ours,
        "seconds": seconds, "all_seconds": times, "payload_bytes": payload, "limit_seconds": limit,
        "ratio": seconds / limit, "link_bytes": links,
    }  # fmt: skip


def _compare(network: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rows of one network."""
    rate, _, trip = network.partition(",")
    with Wan(sites=("C", *PARTIES), rate=rate or None, rtt=trip or None) as wan:
        test = wan.self_test()
        if not arguments.unchecked:
            test.check()
        mbits = test.wire_goodput * 8e-6
        print(f"\n{network}: plain TCP {mbits:.1f} Mbit/s both ways at once, round trip {test.round_trip * 1e3:.1f} ms",
              file=sys.stderr, flush=True)  # fmt: skip
        rows: dict[str, Any] = {}
        skipped: dict[str, str] = {}
        for name in arguments.system:
            try:
                rows[name] = measure(SYSTEMS[name], wan, arguments, test.wire_goodput)
                print(_line(rows[name]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
            except CheckFailed as error:
                skipped[name] = str(error)
                print(f"{SYSTEMS[name].title}: left out: {error}", file=sys.stderr, flush=True)
            except TrainingFailed as error:
                skipped[name] = str(error)
                print(f"{SYSTEMS[name].title}: failed: {error}", file=sys.stderr, flush=True)
    return {"network": network, "wire_goodput": test.wire_goodput, "round_trip": test.round_trip, "rows": rows,
            "left_out": skipped}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    links = ", ".join(
        f"{site} {ways['sent'] / 1e6:.1f}/{ways['received'] / 1e6:.1f}"
        for site, ways in row["link_bytes"].items()
        if site in PARTIES or ways["sent"] > 1e5
    )
    return f"{row['title']:46} {row['seconds']:6.2f} s  {row['ratio']:5.2f} x limit  MB up/down: {links}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME",
                        help=f"of {', '.join(SYSTEMS)}")  # fmt: skip
    parser.add_argument("--network", nargs="+", default=list(NETWORKS), metavar="RATE,RTT", help="of a party's link")
    parser.add_argument("--tensors", choices=sorted(LISTS), default="resnet18")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=1)
    parser.add_argument("--unchecked", action="store_true", help="measure even if the emulated links are off")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Compare the systems on each network."""
    arguments = _arguments()
    return conclude(lambda: [_compare(network, arguments) for network in arguments.network], as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
