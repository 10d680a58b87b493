"""One rank of hivemind in peers.py: an averager. argv: DTYPE LIST; DTYPE is that of the tensors on the wire.

Groups are formed before the clock starts (`require_trigger`), as hivemind's optimizer does during computation. The
first rank is the first peer of the DHT: it writes its address to the file DHT_FILE. Takes RANK, WORLD_SIZE and
SITE_ADDRESS.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from hivemind.averaging.control import AveragingStage
from hivemind.compression import Float16Compression, NoCompression
from peer_measure import follow
from peer_model import check_all
from tensors import LISTS

LIMIT = 120.0


def main(dtype: str, name: str) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    tensors = [torch.full((size,), rank + 1.0) for size in LISTS[name]]
    dht = joined(rank, Path(os.environ["DHT_FILE"]))
    averager = hivemind.DecentralizedAverager(
        tensors, dht, start=True, prefix="peers", target_group_size=ranks, min_group_size=ranks,
        allow_state_sharing=False, compression=Float16Compression() if dtype == "fp16" else NoCompression(),
    )  # fmt: skip
    control: list[Any] = []

    def prepare() -> None:
        with averager.get_tensors() as current:
            for tensor in current:
                tensor.fill_(rank + 1.0)
        control[:] = [averager.step(wait=False, require_trigger=True, timeout=LIMIT)]
        end = time.monotonic() + LIMIT
        while control[0].stage != AveragingStage.AWAITING_TRIGGER and time.monotonic() < end:
            time.sleep(0.01)

    def exchange() -> None:
        control[0].allow_allreduce()
        if control[0].result(timeout=LIMIT) is None:
            raise RuntimeError("no group was found")

    def check(done: int) -> None:
        with averager.get_tensors() as current:
            check_all(list(current), (ranks + 1) / 2)

    follow(exchange, check, prepare)
    averager.shutdown()
    dht.shutdown()


def joined(rank: int, file: Path) -> Any:
    """Join the DHT, at the address of this rank's site."""
    known: list[str] = []
    end = time.monotonic() + LIMIT
    while rank and not known and time.monotonic() < end:
        time.sleep(0.05)
        if file.exists():
            known = json.loads(file.read_text())
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{os.environ['SITE_ADDRESS']}/tcp/0"], initial_peers=known, start=True, use_relay=False,
        use_auto_relay=False,
    )  # fmt: skip
    if rank == 0:
        half = file.with_suffix(".new")
        half.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
        half.rename(file)
    return dht


if __name__ == "__main__":
    main(*sys.argv[1:])
