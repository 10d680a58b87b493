"""The network `cnn` and the algorithms' rounds, in numpy and float64: workers with equally many batches, plain SGD.

Only initial weights and the order of the samples are geomx's.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from geomx_cli.runtime.bundled import networks
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.data.samples import shard

Array = np.ndarray[Any, np.dtype[np.float64]]
Model = list[Array]
"""Weight and bias of two convolutions and three dense layers."""
BATCH, RATE = 8, 0.02


def initial(seed: int) -> dict[str, Any]:
    return networks.find("cnn", framework="torch").initial_weights(seed)


def gradient(model: Model, images: Array, labels: Array) -> Model:
    """The gradient of the mean softmax cross-entropy."""
    found: Model = []
    layers, state = [], images
    for weight, bias in zip(model[:4:2], model[1:4:2], strict=True):
        windows = sliding_window_view(state, weight.shape[2:], axis=(2, 3))
        outputs = np.einsum("bchwij,ocij->bohw", windows, weight, optimize=True) + bias[:, None, None]
        layers.append((windows, outputs))
        state = pooled(np.maximum(outputs, 0))
    shape, inputs = state.shape, []
    state = state.reshape(len(state), -1)
    for weight, bias in zip(model[4::2], model[5::2], strict=True):
        inputs.append(state)
        scores = state @ weight.T + bias
        state = np.maximum(scores, 0)
    errors = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors /= errors.sum(axis=1, keepdims=True)
    errors[np.arange(len(labels)), labels.astype(int)] -= 1
    errors /= len(labels)
    for weight, given in zip(model[8:3:-2], reversed(inputs), strict=True):
        found[:0] = [errors.T @ given, errors.sum(axis=0)]
        errors = (errors @ weight) * (given > 0)
    errors = errors.reshape(shape)
    for number in (1, 0):
        windows, outputs = layers[number]
        errors = unpooled(errors, np.maximum(outputs, 0)) * (outputs > 0)
        found[:0] = [np.einsum("bchwij,bohw->ocij", windows, errors, optimize=True), errors.sum(axis=(0, 2, 3))]
        if number:
            weight = model[2]
            border = sliding_window_view(np.pad(errors, ((0, 0), (0, 0), (4, 4), (4, 4))), (5, 5), axis=(2, 3))
            errors = np.einsum("bohwij,ocij->bchw", border, weight[:, :, ::-1, ::-1], optimize=True)
    return found


def pooled(state: Array) -> Array:
    """The maximum of each 2 x 2 elements."""
    batch, channels, height, width = state.shape
    found: Array = state.reshape(batch, channels, height // 2, 2, width // 2, 2).max(axis=(3, 5))
    return found


def unpooled(errors: Array, state: Array) -> Array:
    """Errors of the maxima, at their places. Equally large elements are 0, behind a ReLU that passes nothing on."""

    def spread(array: Array) -> Array:
        return array.repeat(2, axis=2).repeat(2, axis=3)

    return spread(errors) * (state == spread(pooled(state)))


class Worker:
    """Its model and its batches."""

    def __init__(self, folder: Path, rank: int, count: int, seed: int) -> None:
        self.model = [value.astype(np.float64) for value in initial(seed).values()]
        self._batches = self._all(folder, rank, count, seed)

    @staticmethod
    def _all(folder: Path, rank: int, count: int, seed: int) -> Iterator[Any]:
        own, epoch = shard(reader.load("fashion-mnist", "train", folder), rank, count), 0
        while True:
            yield from own.batches(BATCH, seed=seed, epoch=epoch, rank=rank)
            epoch += 1

    def gradient(self) -> Model:
        """That of the next batch."""
        images, labels = next(self._batches)
        return gradient(self.model, images.astype(np.float64), labels)

    def steps(self, count: int) -> None:
        """Take so many of its own."""
        for _ in range(count):
            self.model = [value - RATE * slope for value, slope in zip(self.model, self.gradient(), strict=True)]


def mean(models: Sequence[Model]) -> Model:
    return [np.mean(values, axis=0) for values in zip(*models, strict=True)]


def gradients(workers: Sequence[Worker], steps: int) -> Model:
    """Each step with the mean gradient of all (fsa, sync; mixed in one party; async and local with one worker)."""
    for _ in range(steps):
        slopes = mean([worker.gradient() for worker in workers])
        model = [value - RATE * slope for value, slope in zip(workers[0].model, slopes, strict=True)]
        for worker in workers:
            worker.model = model
    return workers[0].model


def parties(workers: Sequence[Worker], k1: int, k2: int, rounds: int) -> Model:
    """Means within each party of two workers after K1 steps, of all parties after K2 of these (hfa)."""
    for number in range(1, rounds + 1):
        for worker in workers:
            worker.steps(k1)
        for party in (workers,) if number % k2 == 0 else (workers[:2], workers[2:]):
            model = mean([worker.model for worker in party])
            for worker in party:
                worker.model = model
    return workers[0].model


def differences(
    workers: Sequence[Worker], rounds: Sequence[Sequence[int]], rate: float, momentum: float = 0.0
) -> Model:
    """Rounds in which each worker takes so many steps, and an outer step of Nesterov's with the mean difference of
    those that took any (diloco; esync).
    """
    world = workers[0].model
    velocity = [np.zeros_like(value) for value in world]
    for counts in rounds:
        for worker, steps in zip(workers, counts, strict=True):
            worker.model = world
            worker.steps(steps)
        moved = mean([worker.model for worker, steps in zip(workers, counts, strict=True) if steps])
        slopes = [old - new for old, new in zip(world, moved, strict=True)]
        velocity = [momentum * speed + slope for speed, slope in zip(velocity, slopes, strict=True)]
        pairs = zip(world, slopes, velocity, strict=True)
        world = [value - rate * (slope + momentum * speed) for value, slope, speed in pairs]
    return world
