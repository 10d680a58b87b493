"""One rank of torch's gloo in peers.py: flat, in two levels, and DistributedDataParallel.

argv: MODE DTYPE LIST, where MODE is "all-reduce", "two-level" or "ddp", and DTYPE fp32 or fp16. Takes RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT and PIECE_BYTES, of a piece in two levels, whose three stages overlap. Ranks of a party are
adjacent, so that a ring crosses each link once in each direction.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peer_measure import follow
from peer_model import Payload, check_all
from tensors import LISTS
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

PARTY = 2
BUCKET = 25 << 20
"""Bytes; the default of DistributedDataParallel."""


def main(mode: str, dtype: str, name: str) -> None:
    dist.init_process_group("gloo")
    start = {"all-reduce": _flat, "two-level": _two_levels, "ddp": _ddp}[mode]
    follow(*start(LISTS[name], dtype == "fp16"))
    dist.destroy_process_group()


Parts = tuple[Callable[[], None], Callable[[int], None], Callable[[], None]]


def _expected() -> float:
    """The mean of what the ranks contribute: each its rank + 1."""
    return float(dist.get_world_size() + 1) / 2


def _ddp(sizes: list[int], half: bool) -> Parts:
    payload = Payload(sizes, dist.get_rank() + 1.0)
    model = DistributedDataParallel(payload, bucket_cap_mb=BUCKET >> 20, gradient_as_bucket_view=True)
    if half:
        model.register_comm_hook(None, fp16_compress_hook)
    def backward() -> None:
        loss.pop().backward()

    loss: list[Any] = []

    def prepare() -> None:
        payload.zero_grad()
        loss.append(model())

    def check(done: int) -> None:
        check_all([item.grad for item in payload.tensors], _expected())

    return backward, check, prepare


def _flat(sizes: list[int], half: bool) -> Parts:
    """A bare all-reduce of buckets, all of them begun at once."""
    whole = torch.empty(sum(sizes), dtype=torch.float16 if half else torch.float32)
    buckets = whole.split(BUCKET // whole.element_size())

    def exchange() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()

    def check(done: int) -> None:
        check_all([whole], _expected() * dist.get_world_size())

    return exchange, check, lambda: _fill(whole)


def _fill(whole: Any) -> None:
    whole.fill_(dist.get_rank() + 1.0)


def _two_levels(sizes: list[int], half: bool) -> Parts:
    """A sum within each party, one of the parties' leaders, and a broadcast within each party, piece by piece.

    Each stage has a group of its own, and begins a piece as soon as the stage before has ended it.
    """
    ranks = range(dist.get_world_size())
    groups = [[dist.new_group(list(ranks[first : first + PARTY])) for first in ranks[::PARTY]] for _ in range(2)]
    leaders = dist.new_group(list(ranks[::PARTY]))
    rank = dist.get_rank()
    leader = rank // PARTY * PARTY
    inner, outer = (stage[rank // PARTY] for stage in groups)
    whole = torch.empty(sum(sizes))
    pieces = whole.split(int(os.environ["PIECE_BYTES"]) // whole.element_size())

    def exchange() -> None:
        sums = [dist.reduce(piece, leader, group=inner, async_op=True) for piece in pieces]
        crossing = []
        for piece, work in zip(pieces, sums, strict=True):
            work.wait()
            if rank == leader:
                sent = piece.half() if half else piece
                crossing.append((sent, dist.all_reduce(sent, group=leaders, async_op=True)))
        copies = []
        for number, piece in enumerate(pieces):
            if rank == leader:
                sent, work = crossing[number]
                work.wait()
                if half:
                    piece.copy_(sent)
            copies.append(dist.broadcast(piece, leader, group=outer, async_op=True))
        for work in copies:
            work.wait()

    def check(done: int) -> None:
        check_all([whole], _expected() * dist.get_world_size())

    return exchange, check, lambda: _fill(whole)


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    main(*sys.argv[1:])
