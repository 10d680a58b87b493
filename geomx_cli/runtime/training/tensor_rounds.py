"""A worker's rounds of a model's tensors."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.runtime.training.model import flat_views

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.runtime.training.model import ModelWeights

__all__ = ["TensorRounds"]


class TensorRounds:
    """One buffer per tensor: `push` sends its content, and `wait` returns with the round's result in it.

    Tensors nearer to the input have higher send priority, as they are needed first. For the training thread only; all
    methods raise the client's error after the job has failed.

    vector: all buffers, float32 of shape (n,).
    buffers: its parts, 1-D, in the order of the model's tensors.
    """

    def __init__(self, client: "Client", model: "ModelWeights") -> None:
        self.vector = np.zeros(model.size, np.float32)
        self.buffers = flat_views(self.vector, model.sizes)
        self._model, self._names = model, model.names
        self._client = client
        self._begun: dict[int, PendingExchange] = {}

    def pull(self) -> None:
        """Fill all buffers with the servers' values and write them to the model; blocks until there are any. In an
        asynchronous job these are the global servers' newest.
        """
        items = enumerate(zip(self._names, self.buffers, strict=True))
        for future in [self._client.pull(name, buffer, priority=-index) for index, (name, buffer) in items]:
            future.result()
        self._model.write_weights(self.vector)

    def push(self, index: int, weight: float = 1.0, *, keeps: bool = False) -> None:
        """Contribute a tensor's buffer to its next round, with this weight; returns at once. keeps: leave the result in
        the exchange, so that the buffer can be written once that is over (`reuse`).
        """
        buffer = self.buffers[index]
        out = None if keeps else buffer
        self._begun[index] = self._client.exchange(self._names[index], buffer, out, priority=-index, weight=weight)

    def abstain(self, index: int) -> None:
        """Abstain from a tensor's next round; returns at once."""
        self._begun[index] = self._client.exchange(self._names[index], None, self.buffers[index], priority=-index)

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Wait until the results of these tensors' rounds are in their buffers; by default, of all tensors."""
        for index in list(self._begun) if tensors is None else tensors:
            begun = self._begun.pop(index)
            begun.done.result()
            begun.copy_to(self.buffers[index])

    def pending(self) -> "Mapping[int, PendingExchange]":
        """The rounds begun and not waited for, by tensor."""
        return self._begun

    def reuse(self, index: int) -> None:
        """Wait until a tensor's buffer may be written; its round's result stays in the exchange."""
        if (begun := self._begun.pop(index, None)) is not None:
            begun.done.result()
