"""One rank of torch's gloo in peers.py: flat, in two levels, and DistributedDataParallel.

argv: MODE DTYPE LIST, where MODE is "all-reduce", "two-level" or "ddp", and DTYPE fp32 or fp16. Takes RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT and PIECE_BYTES, of a piece in two levels, whose three stages overlap. Ranks of a party are
adjacent, so that a ring crosses each link once in each direction.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from peer_measure import follow
from peer_model import Parts, Payload, check_all, passes
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


def _expected() -> float:
    """The mean of what the ranks contribute: each its rank + 1."""
    return float(dist.get_world_size() + 1) / 2


def _ddp(sizes: list[int], half: bool) -> Parts:
    payload = Payload(sizes, dist.get_rank() + 1.0)
    model = DistributedDataParallel(payload, bucket_cap_mb=BUCKET >> 20, gradient_as_bucket_view=True)
    if half:
        model.register_comm_hook(None, fp16_compress_hook)
    return passes(payload, model, _expected())


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


class _Gradients:
    """A backward pass into one buffer, whose pieces come out of `ready` in order, each with its sum within the party
    begun. The tensors lie in it in the order in which the pass computes them.
    """

    def __init__(self, sizes: list[int], value: float, begin: Callable[[Any], Any]) -> None:
        self.whole = torch.zeros(sum(sizes))
        self.pieces = self.whole.split(int(os.environ["PIECE_BYTES"]) // self.whole.element_size())
        self.ready: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._payload = Payload(sizes, value)
        self._begin = begin
        self._computed = self._begun = 0
        self._loss: Any = None
        place = 0
        for parameter in reversed(self._payload.tensors):
            parameter.grad = self.whole[place : place + parameter.numel()]
            place += parameter.numel()
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def prepare(self) -> None:
        self.whole.zero_()
        self._computed = self._begun = 0
        self._loss = self._payload()

    def compute(self) -> None:
        self._loss.backward()

    def _on_gradient(self, parameter: Any) -> None:
        self._computed += parameter.numel()
        while self._begun < len(self.pieces) and self._end <= self._computed:
            piece = self.pieces[self._begun]
            self.ready.put((piece, self._begin(piece)))
            self._begun += 1

    @property
    def _end(self) -> int:
        """Of the next piece."""
        return min(len(self.whole), (self._begun + 1) * len(self.pieces[0]))


def _two_levels(sizes: list[int], half: bool) -> Parts:
    """A sum within each party, one of the parties' leaders, and a broadcast within each party, piece by piece, from
    gradients that a thread computes meanwhile.

    Each stage has a group of its own, and begins a piece as soon as the stage before has ended it.
    """
    ranks = range(dist.get_world_size())
    groups = [[dist.new_group(list(ranks[first : first + PARTY])) for first in ranks[::PARTY]] for _ in range(2)]
    leaders = dist.new_group(list(ranks[::PARTY]))
    rank = dist.get_rank()
    leader = rank // PARTY * PARTY
    inner, outer = (stage[rank // PARTY] for stage in groups)
    given = _Gradients(sizes, rank + 1.0, lambda piece: dist.reduce(piece, leader, group=inner, async_op=True))

    def exchange() -> None:
        thread = threading.Thread(target=given.compute)
        thread.start()
        crossing = []
        for _ in given.pieces:
            piece, work = given.ready.get()
            work.wait()
            if rank == leader:
                sent = piece.half() if half else piece
                crossing.append((sent, dist.all_reduce(sent, group=leaders, async_op=True)))
        copies = []
        for number, piece in enumerate(given.pieces):
            if rank == leader:
                sent, work = crossing[number]
                work.wait()
                if half:
                    piece.copy_(sent)
                piece.div_(len(ranks))
            copies.append(dist.broadcast(piece, leader, group=outer, async_op=True))
        for work in copies:
            work.wait()
        thread.join()

    def check(done: int) -> None:
        check_all([given.whole], _expected())

    return exchange, check, given.prepare


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
    main(*sys.argv[1:])
