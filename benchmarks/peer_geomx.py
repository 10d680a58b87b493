"""One worker of geomx in peers.py: the three lines of a PyTorch script, or a script for torchrun.

argv: MODE LIST, where MODE is "wrap" (geomx_cli.torch.wrap with an algorithm that exchanges gradients), "diloco" (the
same with a round after each step), "shards" (the same with a model that fully_shard divides in each party) or "ddp"
(DistributedDataParallel over the process group that geomx provides).
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from peer_measure import follow
from peer_model import Payload, check_all, passes
from tensors import LISTS
from torch.nn.parallel import DistributedDataParallel

import geomx_cli.torch as geomx


def main(mode: str, name: str) -> None:
    {"wrap": _wrap, "diloco": _diloco, "shards": _shards, "ddp": _ddp}[mode](LISTS[name])


def _wrapped(sizes: list[int]) -> tuple[Payload, Any]:
    geomx.init()
    payload = Payload(sizes, geomx.global_rank() + 1.0)
    return payload, geomx.wrap(payload, torch.optim.SGD(payload.parameters(), lr=1.0))


def _wrap(sizes: list[int]) -> None:
    payload, _ = _wrapped(sizes)
    follow(*passes(payload, payload, (geomx.num_all_workers() + 1) / 2))


def _ddp(sizes: list[int]) -> None:
    dist.init_process_group("gloo")  # geomx's, whatever the script names
    payload = Payload(sizes, dist.get_rank() + 1.0)
    model = DistributedDataParallel(payload, gradient_as_bucket_view=True)
    follow(*passes(payload, model, (dist.get_world_size() + 1) / 2))
    dist.destroy_process_group()


def _diloco(sizes: list[int]) -> None:
    """Each worker's step subtracts its rank + 1, so a round, with outer rate 1, subtracts the mean of that."""
    payload, optimizer = _wrapped(sizes)

    def check(done: int) -> None:
        check_all(list(payload.tensors), -done * (geomx.num_all_workers() + 1) / 2, 1e-3)

    follow(optimizer.step, check, payload.set_gradients)


def _shards(sizes: list[int]) -> None:
    """As _diloco, but each worker has a part of all tensors, and each party's steps subtract its number + 1."""
    from torch.distributed.fsdp import fully_shard

    geomx.init()
    parties = geomx.num_all_workers() // dist.get_world_size()
    payload = Payload(sizes, geomx.global_rank() // dist.get_world_size() + 1.0)
    fully_shard(payload)
    optimizer = geomx.wrap(payload, torch.optim.SGD(payload.parameters(), lr=1.0))

    def check(done: int) -> None:
        check_all([item.to_local() for item in payload.tensors], -done * (parties + 1) / 2, 1e-3)

    follow(optimizer.step, check, payload.set_gradients)


if __name__ == "__main__":
    main(*sys.argv[1:])
