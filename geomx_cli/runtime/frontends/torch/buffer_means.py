"""Averages a model's floating-point buffers, as running statistics of batch normalization, in one exchange a round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.runtime.frontends.torch.script_model import read, write
from geomx_cli.runtime.training.flat_views import flat_views

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.pending_exchange import PendingExchange

__all__ = ["BUFFERS", "BufferMeans"]

BUFFERS = "geomx.buffers"
"""Name of the key: the elements of all buffers in float32."""


class BufferMeans:
    """For the training thread; nothing is exchanged without buffers. Workers that have finished, and contribute none,
    get the means too.
    """

    def __init__(self, client: "Client", key: str, buffers: Sequence[Any], priority: int) -> None:
        self._client = client
        self._key = key
        self._buffers = buffers
        self._priority = priority
        self._vector = np.zeros(sum(tensor.numel() for tensor in buffers), np.float32)
        self._parts = flat_views(self._vector, [tensor.numel() for tensor in buffers])
        self._exchange: PendingExchange | None = None

    def begin(self, *, contributes: bool) -> None:
        """Begin a round, or abstain from it; returns at once."""
        if not self._buffers:
            return
        if contributes:
            for part, tensor in zip(self._parts, self._buffers, strict=True):
                read(tensor, part)
        source = self._vector if contributes else None
        self._exchange = self._client.exchange(self._key, source, self._vector, priority=self._priority)

    def take(self) -> None:
        """Wait for the means, and write them to the buffers. Raises the client's error after the job has failed."""
        if self._exchange is None:
            return
        self._exchange.done.result()
        weight, self._exchange = self._exchange.weight, None
        if weight:
            self._vector /= np.float32(weight)
            for part, tensor in zip(self._parts, self._buffers, strict=True):
                write(tensor, part)
