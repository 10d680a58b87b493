"""Reference results of training with uneven data, in numpy and fp64: one dense layer, the algorithms' rounds.

Only the division into batches is taken from geomx, none of its servers, weights or votes. Each algorithm returns the
global model after each of its rounds, by the number of rounds that a worker has completed by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from scripts import tiny

from geomx_cli.runtime.data.samples import Samples, shard

Array = np.ndarray[Any, np.dtype[np.float64]]
Model = list[Array]
"""The weight, (classes, 4), and the bias, (classes,)."""
History = dict[int, Model]
BATCH, EPOCHS, RATE, MOMENTUM = 4, 2, 0.1, 0.5


def samples(split: str = "train", count: int = 90) -> Samples:
    images, labels = tiny.data(split, "", count)
    return Samples(images, labels, tiny.CLASSES)


def shards(workers: int, seed: int, count: int = 90) -> list[Samples]:
    split = "dirichlet:0.2" if workers > 1 else "iid"
    return [shard(samples("train", count), rank, workers, split, seed) for rank in range(workers)]


def batches_of(workers: int, seed: int) -> list[list[tuple[Array, Array]]]:
    found = []
    for rank, own in enumerate(shards(workers, seed)):
        found.append([b for e in range(EPOCHS) for b in own.batches(BATCH, seed=seed, epoch=e, rank=rank)])
    return found


def initial(seed: int) -> Model:
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
    bound = np.sqrt(6 / 4)
    return [random.uniform(-bound, bound, (tiny.CLASSES, 4)).astype(np.float32).astype(float), np.zeros(tiny.CLASSES)]


def gradient(model: Model, batch: tuple[Array, Array]) -> Model:
    """The gradient of the mean softmax cross-entropy."""
    images, labels = batch[0].reshape(len(batch[0]), 4).astype(float), batch[1].astype(int)
    scores = images @ model[0].T + model[1]
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    chances[np.arange(len(labels)), labels] -= 1
    return [chances.T @ images / len(labels), chances.mean(axis=0)]


def accuracy(model: Sequence[Any]) -> float:
    test = samples("test")
    scores = test.images.reshape(-1, 4) @ model[0].T + model[1]
    return float((scores.argmax(axis=1) == test.labels).mean())


def checkpoints(folder: Path) -> dict[int, Model]:
    """The weights saved by a job, by the number of rounds, in ascending order."""
    found = {}
    for path in folder.rglob("step-*.npz"):
        with np.load(path) as file:
            names = sorted((name for name in file.files if file[name].ndim), key=lambda name: -file[name].ndim)
            found[int(file["rounds"])] = [file[name] for name in names]
    return dict(sorted(found.items()))


@dataclass
class Local:
    """A worker with its own SGD."""

    model: Model
    batches: list[tuple[Array, Array]]
    velocity: Model = field(default_factory=lambda: [np.zeros((tiny.CLASSES, 4)), np.zeros(tiny.CLASSES)])
    taken: int = 0

    @property
    def left(self) -> int:
        return len(self.batches) - self.taken

    def step(self) -> int:
        """Take a step; returns the number of samples."""
        batch = self.batches[self.taken]
        self.taken += 1
        for index, slope in enumerate(gradient(self.model, batch)):
            self.velocity[index] = MOMENTUM * self.velocity[index] - RATE * slope
            self.model[index] = self.model[index] + self.velocity[index]
        return len(batch[1])


def locals_of(workers: int, seed: int) -> list[Local]:
    return [Local(initial(seed), batches) for batches in batches_of(workers, seed)]


def fsa(workers: int, seed: int) -> History:
    """The mean of the gradients of the workers that have one."""
    history: History = {}
    world, velocity, batches = initial(seed), [np.zeros((tiny.CLASSES, 4)), np.zeros(3)], batches_of(workers, seed)
    for number in range(max(map(len, batches))):
        given = [gradient(world, own[number]) for own in batches if number < len(own)]
        for index in range(2):
            mean = np.mean([slopes[index] for slopes in given], axis=0)
            velocity[index] = MOMENTUM * velocity[index] - RATE * mean
            world[index] = world[index] + velocity[index]
        history[number + 1] = list(world)
    return history


def hfa(parties: Sequence[Sequence[int]], seed: int, k1: int, k2: int, *, by_samples: bool = False) -> History:
    """Means over those that have taken steps: of a party's workers in each round, of the parties in each K2-th."""
    workers = locals_of(sum(map(len, parties)), seed)
    history: History = {}
    values = [initial(seed) for _ in parties]
    while any(worker.left for worker in workers):
        since = [0.0 for _ in parties]
        for _ in range(k2):
            for which, party in enumerate(parties):
                given = []
                for worker in (workers[rank] for rank in party):
                    worker.model = [item.copy() for item in values[which]]
                    seen = sum(worker.step() for _ in range(min(k1, worker.left)))
                    if seen:
                        given.append((worker.model, float(seen) if by_samples else 1.0))
                if given:
                    values[which] = mean_of(given)
                    since[which] += sum(weight for _, weight in given)
        found = [(value, weight if by_samples else 1.0) for value, weight in zip(values, since, strict=True) if weight]
        milestone = mean_of(found)
        values = [[item.copy() for item in milestone] for _ in parties]
        history[(len(history) + 1) * k2] = milestone
    return history


def mean_of(given: Sequence[tuple[Model, float]]) -> Model:
    total = sum(weight for _, weight in given)
    return [sum(model[index] * weight for model, weight in given) / total for index in range(2)]


@dataclass
class Streaming:
    """A worker of DiLoCo; `since`: its samples by fragment; `pushed`: its weights in the last exchange of each tensor;
    `wait`: steps until it takes a result, None for none.
    """

    local: Local
    origin: Model
    since: list[int]
    pushed: Model
    mix: float
    wait: int | None = None

    def take(self, world: Model, fragment: range) -> None:
        for index in fragment:
            self.origin[index] = world[index].copy()
            own = self.local.model
            kept = self.mix * (self.pushed[index] - world[index])
            own[index] = world[index] + kept + own[index] - self.pushed[index]
        self.wait = None


def diloco(
    workers: int, seed: int, inner: int, outer: tuple[float, float], *, fragments: int = 1, overlap: int = 0,
    mix: float = 0.0, by_samples: bool = False,
) -> History:  # fmt: skip
    """Rounds in which each worker contributes the difference of one fragment; the outer step is Nesterov's on the mean.
    """
    rate, momentum = outer
    world, velocity = initial(seed), [np.zeros((tiny.CLASSES, 4)), np.zeros(tiny.CLASSES)]
    mix = mix if overlap else 0.0
    made = [Streaming(item, initial(seed), [0] * fragments, initial(seed), mix) for item in locals_of(workers, seed)]
    turn, last = 0, range(0)
    history: History = {}

    def gives(worker: Streaming, fragment: range) -> bool:
        """Set the steps to the next exchange; returns whether there is anything to contribute."""
        while worker.local.left:
            seen = worker.local.step()
            worker.since = [count + seen for count in worker.since]
            if worker.wait is not None:
                worker.wait -= 1
                if worker.wait == 0:
                    worker.take(world, last)
            if worker.local.taken % (inner // fragments) == 0:
                worker.wait = overlap
                return True
        if worker.wait is not None:
            worker.take(world, last)
        worker.mix, worker.wait = 0.0, 0
        return worker.since[turn] > 0

    while any(worker.local.left or any(worker.since) for worker in made):
        fragment = range(turn, 2, fragments)
        given = []
        for worker in made:
            if gives(worker, fragment):
                weight = float(worker.since[turn]) if by_samples else 1.0
                given.append(([o - m for o, m in zip(worker.origin, worker.local.model, strict=True)], weight))
                for index in fragment:
                    worker.pushed[index] = worker.local.model[index].copy()
                worker.since[turn] = 0
        mean = mean_of(given) if given else []
        for index in fragment if given else ():
            velocity[index] = momentum * velocity[index] + mean[index]
            world[index] = world[index] - rate * (mean[index] + momentum * velocity[index])
        for worker in made:
            if worker.wait == 0:
                worker.take(world, fragment)
        turn, last = (turn + 1) % fragments, fragment
        history[len(history) + 1] = list(world)
    return history
