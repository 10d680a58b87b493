"""Brings a few bytes of each worker to that of global rank 0, beside any algorithm's rounds."""

from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.futures import after
from geomx_cli.ps.cluster.partition import Tensor

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client

__all__ = ["to_first_worker"]


def to_first_worker(client: "Client", name: str, data: "Array") -> "Future[Array] | None":
    """Give `data` (1-D, uint8, a multiple of 4, as many in all workers), once for each name; return all workers' by
    rank in the worker of global rank 0.

    They are initial values of keys, which servers neither sum nor encode. Blocks until the servers have this worker's.
    """
    names = [f"{name}/{rank}" for rank in range(client.num_all_workers)]
    client.declare([Tensor(each, data.size // 4, "float32") for each in names])
    client.init({names[client.global_rank]: data.view(np.float32)}, source=client.global_rank)
    if client.global_rank:
        return None
    table = np.zeros((len(names), data.size), np.uint8)
    pulls = [client.pull(each, row.view(np.float32)) for each, row in zip(names, table, strict=True)]
    return after(pulls, lambda: table)
