"""Measures what saving and restarting cost on this machine.

    python benchmarks/recovery_costs.py                 all of it
    python benchmarks/recovery_costs.py --only write    of write, torn, start, reconnect
    python benchmarks/recovery_costs.py --json          one object

write: the 62 tensors of ResNet-18 (46.8 MB) into memory (tmpfs) and onto a disk: one plain `pwritev`, and commits of a
    state file with one record a slice, with one and with three arrays of that size.
torn: what a SIGKILL in the middle of a `pwritev` leaves: whether the new bytes are a prefix, and of how many pages.
start: seconds from starting a Python process to having imported what a process of each kind needs.
reconnect: which messages of a ZeroMQ dealer a router receives that died and was bound again, over tcp and unix sockets.
"""

import argparse
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from codec_speed import slices
from outcome import conclude

from geomx_cli.ps.state_file import StateFile

TMPFS, PAGE = Path("/dev/shm"), 4096
KINDS = {
    "scheduler or server": "import geomx_cli.runtime.script, geomx_cli.ps.server",
    "numpy worker": "import geomx_cli.runtime.frontends.numpy.linear",
    "MXNet worker": "import mxnet",
    "PyTorch worker": "import torch",
}
SENT, LOST_AT = 2000, 1000


def median_ms(work: Callable[[], object], repeat: int) -> dict[str, float]:
    times = []
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begun))
    return {"median_ms": statistics.median(times), "lowest_ms": min(times), "highest_ms": max(times)}


def write(repeat: int) -> list[dict[str, Any]]:
    """Milliseconds of writing the model."""
    arrays = slices("resnet18", 1)
    rows: list[dict[str, Any]] = []
    for where, folder in (("tmpfs", TMPFS), ("disk", Path.cwd())):
        with tempfile.TemporaryDirectory(dir=folder, prefix="geomx-costs-") as place:
            plain = os.open(Path(place) / "plain", os.O_RDWR | os.O_CREAT)
            os.posix_fallocate(plain, 0, sum(array.nbytes for array in arrays))
            views = [array.data.cast("B") for array in arrays]
            taken = median_ms(partial(os.pwritev, plain, views, 0), repeat)
            rows.append({"where": where, "what": "pwritev", **taken})
            os.close(plain)
            for copies in (1, 3):
                file = StateFile(Path(place) / f"state-{copies}")

                def commit(file: StateFile = file, copies: int = copies) -> None:
                    for number, array in enumerate(arrays):
                        file.commit(f"0.{number}", {"round": 1}, {str(copy): array for copy in range(copies)})

                commit()
                commit()
                rows.append({"where": where, "what": f"commit of {copies}", **median_ms(commit, repeat)})
                file.close()
    return rows


def _rewrite(path: str, size: int) -> None:
    """Overwrite the file for ever, each time with the next number."""
    file = os.open(path, os.O_RDWR)
    number = 0
    while True:
        number = number % 250 + 1
        os.pwritev(file, [np.full(size, number, np.uint8).data], 0)


def torn(repeat: int) -> dict[str, Any]:
    """What kills leave."""
    size, found = 16 * 2**20, []
    with tempfile.TemporaryDirectory(dir=TMPFS, prefix="geomx-costs-") as place:
        path = Path(place) / "torn"
        for _ in range(repeat):
            path.write_bytes(bytes(size))
            writer = multiprocessing.Process(target=_rewrite, args=(str(path), size))
            writer.start()
            time.sleep(0.2 + 0.2 * random.random())
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            content = np.fromfile(path, np.uint8)
            found.append(np.flatnonzero(np.diff(content)) + 1)
    inside = [int(edges[0]) for edges in found if len(edges)]
    return {
        "kills": repeat, "in_the_middle": len(inside), "one_edge": all(len(edges) <= 1 for edges in found),
        "at_a_page": all(edge % PAGE == 0 for edge in inside),
    }  # fmt: skip


def start(repeat: int) -> list[dict[str, Any]]:
    """Seconds until imports are done; a kind that is not installed here is left out."""
    rows = []
    for kind, code in KINDS.items():
        argv = [sys.executable, "-P", "-c", code]
        if subprocess.run(argv, capture_output=True, check=False).returncode == 0:
            rows.append({"kind": kind, **median_ms(partial(subprocess.run, argv, check=True), repeat)})
    return rows


def _router(endpoint: str, most: int, heard: Any) -> None:
    router = zmq.Context().socket(zmq.ROUTER)
    router.bind(endpoint)
    numbers: list[int] = []
    heard.send("bound")
    while len(numbers) < most and router.poll(3000):
        numbers.append(int(router.recv_multipart()[1]))
    heard.send(numbers)
    if most < SENT:
        time.sleep(3600)


def reconnect() -> list[dict[str, Any]]:
    """Numbers that the second router receives, of those that a dealer sends while the first one is killed."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="geomx-costs-") as place:
        for endpoint in ("tcp://127.0.0.1:29871", f"ipc://{place}/socket"):
            ours, theirs = multiprocessing.Pipe()
            first = multiprocessing.Process(target=_router, args=(endpoint, LOST_AT // 2, theirs))
            first.start()
            ours.recv()
            dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
            dealer.set(zmq.SNDHWM, 0)
            dealer.set(zmq.LINGER, 0)
            dealer.connect(endpoint)
            for number in range(LOST_AT):
                dealer.send(b"%d" % number)
            ours.recv()
            first.kill()
            first.join()
            for number in range(LOST_AT, SENT):
                dealer.send(b"%d" % number)
            second = multiprocessing.Process(target=_router, args=(endpoint, SENT, theirs))
            begun = time.perf_counter()
            second.start()
            ours.recv()
            numbers = ours.recv()
            took = time.perf_counter() - begun
            second.join()
            dealer.close()
            rows.append({
                "transport": endpoint.partition(":")[0], "sent_before": LOST_AT, "sent_after": SENT - LOST_AT,
                "received": len(numbers), "first": numbers[0] if numbers else None,
                "in_order": numbers == sorted(numbers), "lost": SENT - LOST_AT // 2 - len(numbers), "seconds": took,
            })  # fmt: skip
    return rows


def _show(results: Sequence[Any]) -> None:
    for name, rows in results[0].items():
        for row in rows if isinstance(rows, list) else [rows]:
            cells = (f"{key} {one:.1f}" if isinstance(one, float) else f"{key} {one}" for key, one in row.items())
            print(f"{name}: {', '.join(cells)}")


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works: dict[str, Callable[[int], Any]] = {
        "write": write, "torn": lambda repeat: torn(10 * repeat), "start": start, "reconnect": lambda _: reconnect(),
    }  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(works), default=list(works))
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    return conclude(lambda: [{name: works[name](given.repeat) for name in given.only}], as_json=given.json, show=_show)


if __name__ == "__main__":
    sys.exit(main())
