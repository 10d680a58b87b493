"""A gluon block as a model of the bundled training job, and MXNet's part of a training session."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.data.samples import Batch
from geomx_cli.runtime.frontends.mxnet.arrays import Completion, Engine
from geomx_cli.runtime.frontends.mxnet.load import device_context, load_mxnet
from geomx_cli.runtime.frontends.mxnet.native import ArrayInfo, Native
from geomx_cli.runtime.training.model import ModelAdapter, Network, seed_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.operation_queue import PendingExchange

__all__ = ["Built", "GluonModel", "session"]


@contextlib.contextmanager
def session(device: str, seed: int) -> Iterator[None]:
    """See Network.session. Also raises InvalidSettings if MXNet is missing."""
    mx = load_mxnet()
    mx.random.seed(seed)
    with device_context(mx, device):  # default context for this thread's arrays
        yield


@dataclass(frozen=True)
class Built:
    """An MXNet block and its gluon parameters, in the orders of `Network.parameters` and `Network.statistics`.

    The block is hybridized, takes float32 images of shape (b, *shape) and returns logits of shape (b, classes).
    """

    block: Any
    trained: Sequence[Any]
    running: Sequence[Any]


class GluonModel(ModelAdapter):
    """A block on MXNet's current device at construction.

    MXNet's engine computes asynchronously, in call order. All arrays are the same objects for the model's lifetime.

    weights, gradients: float32 NDArrays in the order of the network's parameters.
    statistics: float32 NDArrays by name.
    """

    def __init__(self, network: Network, built: Built) -> None:
        super().__init__(network)
        self._mx = mx = load_mxnet()
        self._block = built.block
        self._loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.weights: list[Any] = [parameter.list_data()[0] for parameter in built.trained]
        self.gradients: list[Any] = [parameter.list_grad()[0] for parameter in built.trained]
        names = [item.name for item in network.statistics]
        running = [parameter.list_data()[0] for parameter in built.running]
        self._late: dict[int, ArrayInfo] = {}
        self.statistics: dict[str, Any] = dict(zip(names, running, strict=True))

    def warm_up(self, samples: int) -> None:
        """Run both passes once on a batch of zeros, before the weights arrive. MXNet builds its kernels at first use,
        which takes longer than many steps.
        """
        before = self.read_statistics()
        images = np.zeros((samples, *self.network.shape), np.float32)
        self.forward_backward((images, np.zeros(samples, np.float32)), 1.0)
        self.wait_for_gradients()
        self.write_statistics(before)

    def reseed(self, numbers: Sequence[int]) -> None:
        """See ModelAdapter."""
        self._mx.random.seed(seed_of(numbers))

    def forward_backward(self, batch: Batch, scale: float) -> "_Loss":
        """See ModelAdapter."""
        images, labels = (self._mx.nd.array(array) for array in batch)
        with self._mx.autograd.record():
            loss = self._loss(self._block(images), labels).mean()
            scaled = loss * scale
        scaled.backward()
        return _Loss(loss)

    def wait_for_gradients(self) -> None:
        """See ModelAdapter."""
        for gradient in self.gradients:
            gradient.wait_to_read()

    def read_gradient(self, index: int, out: Floats) -> None:
        """See ModelAdapter."""
        out[:] = self.gradients[index].asnumpy().reshape(-1)

    def read_weights(self, out: Floats) -> None:
        """See ModelAdapter."""
        start = 0
        for weight in self.weights:
            out[start : start + weight.size] = weight.asnumpy().reshape(-1)
            start += weight.size

    def write_weights(self, vector: Floats) -> None:
        """Set all weights. They are copied to MXNet in one piece, because one copy for each tensor would take longer
        than the step that produced them.
        """
        staged, parts = self._staging
        staged._sync_copyfrom(vector)
        for part, weight in zip(parts, self.weights, strict=True):
            part.copyto(weight)

    @functools.cached_property
    def _staging(self) -> tuple[Any, list[Any]]:
        """Return a flat array of all tensors' elements, and its views in their shapes."""
        staged, parts, start = self._mx.nd.empty(self.size), [], 0
        for weight in self.weights:
            parts.append(staged[start : start + weight.size].reshape(weight.shape))
            start += weight.size
        return staged, parts

    def write_weight(self, index: int, value: Floats) -> None:
        """See ModelAdapter."""
        target = self.weights[index]
        self._mx.nd.array(value.reshape(target.shape)).copyto(target)

    def write_late(self, index: int, result: "PendingExchange") -> None:
        """See ModelWeights: when the result has arrived, the engine writes the weights, and starts operations that read
        them.
        """
        target, native = self.weights[index], self._engine.native
        if index not in self._late:  # arrays that no kernel reads keep MXNet's own layout
            self._late[index] = native.value(self._mx.nd.empty(target.shape, self._mx.cpu()))
        staged = self._late[index]

        def write(done: Completion) -> None:
            def finish(finished: "Future[None]") -> None:
                if (error := finished.exception()) is None:
                    result.copy_to(native.view(staged.array, staged.dtype, staged.size))
                    result.release()
                done(error)

            result.done.add_done_callback(finish)

        self._engine.queue(write, reads=[], writes=[staged.array], priority=-index, name="geomx weights")
        staged.array.copyto(target)

    @functools.cached_property
    def _engine(self) -> Engine:
        return Engine(self._mx, Native(self._mx))

    def read_statistics(self) -> dict[str, Floats]:
        """See ModelAdapter."""
        return {name: running.asnumpy() for name, running in self.statistics.items()}

    def write_statistics(self, values: Mapping[str, Floats]) -> None:
        """See ModelAdapter."""
        for name, value in values.items():
            target = self.statistics[name]
            self._mx.nd.array(value.reshape(target.shape)).copyto(target)

    def copy_weights_from(self, other: ModelAdapter) -> None:
        """See ModelAdapter; copies on the device if both are of this class."""
        if not isinstance(other, GluonModel):
            super().copy_weights_from(other)
            return
        for source, target in zip(other.weights, self.weights, strict=True):
            source.copyto(target)
        for name, running in other.statistics.items():
            running.copyto(self.statistics[name])

    def count_correct(self, batch: Batch) -> int:
        """See ModelAdapter."""
        images, labels = batch
        scores = self._block(self._mx.nd.array(images)).asnumpy()
        return int((scores.argmax(axis=1) == labels).sum())


@dataclass(frozen=True)
class _Loss:
    """A loss that may still be computing; conversion to float waits for it."""

    array: Any

    def __float__(self) -> float:
        return float(self.array.asscalar())
