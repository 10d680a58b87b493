"""Copies bytes and tensors from one worker to all others, exactly: initial values are never encoded."""

from typing import TYPE_CHECKING

import numpy as np
import torch

from geomx_cli.ps.arrays import Array
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.net.wire import EVERY

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.party_group import PartyGroup

__all__ = ["Broadcast", "PartyBroadcast"]


class Broadcast:
    """From the worker of global rank `source`, by default the one that provides the initial values. Blocks; all workers
    make the same calls. Raises the client's error after the job has failed. is_source: whether that is this worker.
    shard: of the keys, see Tensor.
    """

    def __init__(self, client: Client, source: int | None = None, shard: int = EVERY) -> None:
        self._client = client
        self._shard = shard
        self._source = client.late_source if source is None else source
        self.is_source = client.is_master if self._source is None else client.global_rank == self._source

    def arrays(self, values: dict[str, Array]) -> None:
        """Declare keys of these names and write the source's values to all workers' arrays: 1-D, contiguous, of
        float16, float32 or float64, of the same sizes everywhere.
        """
        client = self._client
        tensors = [Tensor(name, value.size, str(value.dtype), shard=self._shard) for name, value in values.items()]
        client.declare(tensors)
        client.init(values, source=self._source)
        if not self.is_source:
            for future in [client.pull(name, value) for name, value in values.items()]:
                future.result()

    def data(self, name: str, content: bytes) -> bytes:
        """Return the source's `content`, of any length, on all workers. The keys NAME and NAME.size must be new."""
        size = np.array([len(content)], np.float64)
        self.arrays({f"{name}.size": size})
        length = int(size[0])
        padded = np.zeros(-(-length // 4) * 4, np.uint8)
        if self.is_source:
            padded[:length] = np.frombuffer(content, np.uint8)
        if length:
            self.arrays({name: padded.view(np.float32)})
        return padded[:length].tobytes()


class PartyBroadcast(Broadcast):
    """As Broadcast: through the servers between the leaders of parties, and within each party by its process group.

    between: that of the leaders, None in other workers.
    origin: the source's rank in its party.
    """

    def __init__(self, group: "PartyGroup", between: Broadcast | None, origin: int = 0) -> None:
        self._group = group
        self._between = between
        self._own = bool(group.share(int(between is not None and between.is_source)))
        self._origin = origin if self._own else 0
        self.is_source = self._own and group.rank == self._origin

    def arrays(self, values: dict[str, Array]) -> None:
        """See Broadcast; the source leads its party."""
        if self._between is not None:
            self._between.arrays(values)
        for value in values.values():
            if value.size:
                self._group.wait(self._group.send(torch.from_numpy(value)))

    def data(self, name: str, content: bytes) -> bytes:
        """See Broadcast."""
        if self._own and self._origin:
            content = self._group.share_bytes(content, self._origin)
        if self._between is not None:
            content = self._between.data(name, content)
        return self._group.share_bytes(content)
