"""Training computed in numpy, independently of geomx and PyTorch."""

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(1, str(Path(__file__).parent / "scripts"))

from common import batches, linear

RATE = 0.1


class Dense:
    """Softmax regression with plain SGD, in float64, from the weights and on the data of the scripts."""

    def __init__(self, steps: int = 40) -> None:
        start = linear(seed=0)
        self.weight = start.weight.detach().numpy().astype(np.float64)
        self.bias = start.bias.detach().numpy().astype(np.float64)
        self._steps = steps
        self._batches: dict[int, Any] = {}

    def batch(self, rank: int, step: int) -> tuple[Any, Any]:
        """A worker's batch of a step, as numpy arrays."""
        if rank not in self._batches:
            self._batches[rank] = [(images.numpy(), labels.numpy()) for images, labels in batches(rank, self._steps)]
        images, labels = self._batches[rank][step]
        return images.astype(np.float64), labels

    def gradient(self, rank: int, step: int) -> tuple[Any, Any]:
        """The gradients of the mean loss of a worker's batch: of weight and bias."""
        images, labels = self.batch(rank, step)
        scores = images @ self.weight.T + self.bias
        errors = np.exp(scores - scores.max(axis=1, keepdims=True))
        errors /= errors.sum(axis=1, keepdims=True)
        errors[np.arange(len(labels)), labels] -= 1
        errors /= len(labels)
        return errors.T @ images, errors.sum(axis=0)

    @property
    def vector(self) -> Any:
        """All weights."""
        return np.concatenate([self.weight.reshape(-1), self.bias])

    @vector.setter
    def vector(self, values: Any) -> None:
        self.weight, self.bias = values[: self.weight.size].reshape(self.weight.shape), values[self.weight.size :]

    def step(self, ranks: list[int], step: int, rate: float = RATE) -> None:
        """A step with the mean gradient of these workers."""
        gradients = [self.gradient(rank, step) for rank in ranks]
        self.weight = self.weight - rate * np.mean([weight for weight, _ in gradients], axis=0)
        self.bias = self.bias - rate * np.mean([bias for _, bias in gradients], axis=0)
