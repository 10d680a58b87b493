"""The network `linear`: one dense layer and a softmax, in numpy, without a framework."""

import contextlib
import math
from collections.abc import Iterator

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.data.samples import Batch
from geomx_cli.runtime.training.architecture import Parameter, Shape
from geomx_cli.runtime.training.model import ModelAdapter, Network, flat_views

__all__ = ["network"]


def network(shape: Shape, classes: int) -> Network:
    """Logits: images of shape (b, *shape), flattened, times the weight's transpose, plus the bias."""
    pixels = math.prod(shape)
    parameters = (Parameter("dense.weight", (classes, pixels), None), Parameter("dense.bias", (classes,)))
    return Network(shape, classes, parameters, (), shape[1:], LinearModel, _session)


@contextlib.contextmanager
def _session(device: str, seed: int) -> Iterator[None]:
    if device:
        hint = 'choose another --network, or write devices = ["cpu"] in the inventory'
        raise InvalidSettings(f"this worker is to train on {device}, and the network linear uses no GPU", hint)
    yield


class LinearModel(ModelAdapter):
    """Multinomial logistic regression with softmax cross-entropy loss. Computes synchronously, in float32."""

    def __init__(self, network: Network) -> None:
        super().__init__(network)
        self._vector, self._gradient = np.zeros(self.size, np.float32), np.zeros(self.size, np.float32)
        self._gradients = flat_views(self._gradient, self.sizes)
        shape = network.parameters[0].shape
        weights = flat_views(self._vector, self.sizes)
        self._weight, self._bias, self._weights = weights[0].reshape(shape), weights[1], weights

    def forward_backward(self, batch: Batch, scale: float) -> float:
        """See ModelAdapter."""
        images, labels = batch[0].reshape(len(batch[0]), -1), batch[1].astype(np.int64)
        rows = np.arange(len(labels))
        scores = images @ self._weight.T + self._bias
        scores -= scores.max(axis=1, keepdims=True)
        total = np.exp(scores).sum(axis=1, keepdims=True)
        errors = np.exp(scores) / total
        errors[rows, labels] -= 1
        errors *= np.float32(scale / len(labels))
        np.matmul(errors.T, images, out=self._gradients[0].reshape(self._weight.shape))
        errors.sum(axis=0, out=self._gradients[1])
        return float((np.log(total[:, 0]) - scores[rows, labels]).mean())

    def wait_for_gradients(self) -> None:
        """See ModelAdapter. They are already computed."""

    def read_gradient(self, index: int, out: Floats) -> None:
        """See ModelAdapter."""
        out[:] = self._gradients[index]

    def read_weights(self, out: Floats) -> None:
        """See ModelAdapter."""
        out[:] = self._vector

    def write_weights(self, vector: Floats) -> None:
        """See ModelAdapter."""
        self._vector[:] = vector

    def write_weight(self, index: int, value: Floats) -> None:
        """See ModelAdapter."""
        self._weights[index][:] = value

    def count_correct(self, batch: Batch) -> int:
        """See ModelAdapter."""
        images, labels = batch
        scores = images.reshape(len(images), -1) @ self._weight.T + self._bias
        return int((scores.argmax(axis=1) == labels).sum())
