"""One copy of the network on this process's device, with its weights and gradients."""

import functools
import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.runtime.training.networks import Network
from geomx_cli.runtime.training.samples import Batch

__all__ = ["Replica"]


class Replica:
    """`names`, `weights` and `gradients` run in parallel, from the input to the output; weights start at
    zero. `statistics` are the running means and variances of batch normalisation, by name, which no gradient changes.

    weights, statistics, gradients: float32 NDArrays, the same objects for the replica's whole life. For the training
    thread only. MXNet's engine does the work behind its back: what a method calls queued is done later, in
    the order of the calls.
    """

    def __init__(self, mx: Any, network: Network) -> None:
        self.network = network
        self.names = tuple(parameter.name for parameter in network.parameters)
        self._mx = mx
        built = network.build(mx)
        self._block, parameters = built.block, built.trained
        self._loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self.weights: list[Any] = [parameter.list_data()[0] for parameter in parameters]
        self.statistics: dict[str, Any] = {
            item.name: parameter.list_data()[0]
            for item, parameter in zip(network.statistics, built.running, strict=True)
        }
        self.gradients: list[Any] = [parameter.list_grad()[0] for parameter in parameters]

    def warm_up(self, samples: int) -> None:
        """Go through both passes once, with a batch of zeros and while the weights are yet to come: MXNet builds its
        kernels the first time, which takes longer than many steps.
        """
        before = {name: running.copy() for name, running in self.statistics.items()}
        images = np.zeros((samples, *self.network.shape), np.float32)
        self.forward_backward((images, np.zeros(samples, np.float32)), 1.0)
        self.wait_for_gradients()
        for name, running in before.items():
            running.copyto(self.statistics[name])

    def forward_backward(self, batch: Batch, scale: float) -> Any:
        """Queue both passes: `gradients` become `scale` times those of the batch's mean loss, which is
        returned.
        """
        images, labels = (self._mx.nd.array(array) for array in batch)
        with self._mx.autograd.record():
            loss = self._loss(self._block(images), labels).mean()
            scaled = loss * scale
        scaled.backward()
        return loss

    def wait_for_gradients(self) -> None:
        """Return when the backward pass is done."""
        for gradient in self.gradients:
            gradient.wait_to_read()

    def wait_for_weights(self) -> None:
        """Return when everything queued that changes the weights is done."""
        for weight in self.weights:
            weight.wait_to_read()

    def pull(self, store: Any) -> None:
        """Take all weights from an MXNet KVStore; blocks. The input's come first, as they are used first."""
        for index, (name, weight) in enumerate(zip(self.names, self.weights, strict=True)):
            store.pull(name, out=weight, priority=-index)
        self.wait_for_weights()

    def set_weight(self, index: int, value: npt.NDArray[np.float32]) -> None:
        """Queue new values, of the weight's shape, for one tensor."""
        self._mx.nd.array(value).copyto(self.weights[index])

    def set_weights(self, vector: npt.NDArray[np.float32]) -> None:
        """Queue new values for all tensors: float32 of shape (n,), one tensor after the other.

        They cross to MXNet at once: a crossing of each tensor would take longer than the step that they come from.
        """
        staged, parts = self._staging
        staged._sync_copyfrom(vector)
        for part, weight in zip(parts, self.weights, strict=True):
            part.copyto(weight)

    @functools.cached_property
    def _staging(self) -> tuple[Any, list[Any]]:
        """An array of all tensors' elements, and its parts in their shapes."""
        staged, parts, start = self._mx.nd.empty(sum(weight.size for weight in self.weights)), [], 0
        for weight in self.weights:
            parts.append(staged[start : start + weight.size].reshape(weight.shape))
            start += weight.size
        return staged, parts

    def array(self, value: npt.NDArray[np.float32]) -> Any:
        """A new NDArray with these values, on the replica's device."""
        return self._mx.nd.array(value)

    def copy_weights_from(self, other: "Replica") -> None:
        """Queue a copy of the other's weights as they are now."""
        for source, target in zip(other.weights, self.weights, strict=True):
            source.copyto(target)
        for name, running in other.statistics.items():
            running.copyto(self.statistics[name])

    def count_correct(self, batch: Batch) -> int:
        """How many of the batch's samples the network classifies rightly."""
        images, labels = batch
        scores = self._block(self._mx.nd.array(images)).asnumpy()
        return int((scores.argmax(axis=1) == labels).sum())

    def digest(self) -> str:
        """SHA-256, in hexadecimal, over the names and bytes of all weights: equal only if every bit is."""
        digest = hashlib.sha256()
        for name, weight in zip(self.names, self.weights, strict=True):
            digest.update(name.encode())
            digest.update(weight.asnumpy().tobytes())
        return digest.hexdigest()
