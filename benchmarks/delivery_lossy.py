"""Measures --dgt 1 over links that lose packets, whatever their protocol, on their way up (root, nftables).

    python benchmarks/delivery_lossy.py --rate 100mbit --rtt 30ms --loss 2 --congestion reno bbr

Two parties of one worker, and the global server in a third place. Prints the seconds of an exchange, without computing,
directly and with --dgt 1 for each --wait; and the part of the blocks' bytes that came in a later round, or never.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from delivery import EXCHANGES, marks_of, period
from outcome import conclude
from pushpull_job import Command, planned
from tensors import LISTS
from wan import Wan

from geomx_cli.core.options import Value, decode
from geomx_cli.ps.delivery import dgt

TABLE = {option.name: option for option in dgt.options}


def _exchange(given: argparse.Namespace, wan: Wan, dgt_options: dict[str, Value]) -> tuple[float, dict[str, int]]:
    """Seconds of an exchange, and the global server's newest count of datagrams."""
    script = ("python", EXCHANGES, "client", given.tensors, str(given.warm_up), str(given.iterations))
    options: dict[str, Value] = {"parties": 2, "workers": 1, "topology": "central", "rank_scope": "global"}
    with tempfile.TemporaryDirectory(prefix="gxd") as folder, contextlib.ExitStack() as stack:
        laid = planned(options | dgt_options, Path(folder), wan, script)
        commands: list[Command] = [(item.role, site, argv, env) for item, site, argv, env in laid]
        seconds = period(marks_of(commands, Path(folder), wan, stack)) / given.iterations
        return seconds, _datagrams(Path(folder))


def _datagrams(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in folder.glob("events/*global_server*.jsonl"):
        for line in path.read_text().splitlines():
            found = json.loads(line).get("datagrams") or found
    return found


def _measure(given: argparse.Namespace, congestion: str) -> list[dict[str, Any]]:
    ways: dict[str, dict[str, Value]] = {"direct": {}}
    for wait in given.wait:
        ways[f"--dgt 1 --dgt-wait {wait}"] = {"dgt": 1, "dgt_k": given.k, "dgt_wait": decode(TABLE["dgt_wait"], wait)}
    rows: list[dict[str, Any]] = []
    with Wan(sites=("C", "A", "B"), rate=given.rate, rtt=given.rtt) as wan:
        wan.lose("C", given.loss, congestion)
        for name, options in ways.items():
            runs = [_exchange(given, wan, options) for _ in range(given.runs)]
            times = [seconds for seconds, _ in runs]
            rows.append({"congestion": congestion, "way": name, "seconds": times, "datagrams": runs[-1][1]})
            middle, first = statistics.median(times), statistics.median(rows[0]["seconds"])
            print(f"{congestion:6} {name:28} {middle:6.2f} s an exchange ({1 - middle / first:.0%} less) {runs[-1][1]}")
            sys.stdout.flush()
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rtt", default="30ms")
    parser.add_argument("--loss", type=int, default=2, help="of 100 packets")
    parser.add_argument("--congestion", nargs="+", default=["reno", "bbr"])
    parser.add_argument("--k", type=float, default=0.5)
    parser.add_argument("--wait", nargs="+", default=["1s"], help="--dgt-wait")
    parser.add_argument("--tensors", choices=sorted(LISTS), default="small-resnet18")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Measure all ways with each congestion control."""
    given = _arguments()
    each = (_measure(given, congestion) for congestion in given.congestion)
    return conclude(lambda: [row for rows in each for row in rows], as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
