"""The networks of the bundled training job: their tensors, and the weights that they start from.

For `cnn` these come without a framework, so the master worker, which only hands initial weights to the global servers,
needs none. Weights are always drawn here: no framework's random numbers decide where a job starts.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.errors import InvalidSettings
from geomx_cli.runtime.training.own import is_own

__all__ = ["NETWORKS", "Built", "Network", "Parameter", "Shape", "check_name", "find"]

Floats = npt.NDArray[np.float32]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Parameter:
    """One tensor of a network, float32. Weights are laid out as MXNet has them: outputs first.

    start: the value of all its elements at first; None for weights, which are random.
    """

    name: str
    shape: tuple[int, ...]
    start: float | None = 0.0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Built:
    """An MXNet block and its gluon parameters in the orders of `Network.parameters` and `Network.statistics`.

    The block is hybridised, takes float32 images of shape (b, *shape) and gives logits of shape (b, classes).
    """

    block: Any
    trained: Sequence[Any]
    running: Sequence[Any]


@dataclass(frozen=True)
class Network:
    """A network for images of one shape and so many classes.

    parameters: what is trained, from the input to the output; statistics: the running means and variances of its batch
    normalisation. resized: height and width to which it enlarges images. build: makes its block, given MXNet.
    """

    shape: Shape
    classes: int
    parameters: tuple[Parameter, ...]
    statistics: tuple[Parameter, ...]
    resized: tuple[int, int]
    build: Callable[[Any], Built]

    def initial_weights(self, seed: int) -> dict[str, Floats]:
        """Weights to start from, the same for the same seed in every process; biases are zero, scales are one.

        Uniform in ±sqrt(6 / fan in), which keeps the variance through ReLUs: He, Zhang, Ren and Sun, "Delving
        deep into rectifiers", ICCV 2015, equation 10.
        """
        random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed)))
        weights = {}
        for item in self.parameters:
            if item.start is not None:
                weights[item.name] = np.full(item.shape, item.start, np.float32)
                continue
            bound = math.sqrt(6 / math.prod(item.shape[1:]))
            weights[item.name] = random.uniform(-bound, bound, item.shape).astype(np.float32)
        return weights

    def initial_statistics(self) -> dict[str, Floats]:
        """Means of 0 and variances of 1."""
        return {item.name: np.full(item.shape, item.start, np.float32) for item in self.statistics}


@dataclass(frozen=True)
class _Zoo:
    """One of gluon's model zoo. size: height and width of the images that it is made for; 0 takes them as they are."""

    function: str
    size: int = 0


_ZOO: Mapping[str, _Zoo] = {
    "alexnet": _Zoo("alexnet", 224),
    "resnet18-v1": _Zoo("resnet18_v1"),
    "resnet50-v1": _Zoo("resnet50_v1"),
    "resnet50-v2": _Zoo("resnet50_v2"),
    "mobilenet-v1": _Zoo("mobilenet1_0"),
    "mobilenet-v2": _Zoo("mobilenet_v2_1_0"),
    "inception-v3": _Zoo("inception_v3", 299),
}
NETWORKS = ("cnn", "cnn-bn", *_ZOO)
"""By name."""


def check_name(name: str) -> None:
    """Raises InvalidSettings for a network that there is not; whether one's own works is seen when it is used."""
    if name not in NETWORKS and not is_own(name):
        hint = f"choose one of {', '.join(NETWORKS)}, or write MODULE:FUNCTION for one of your own"
        raise InvalidSettings(f"--network {name}: there is no such network", hint)


def find(name: str, shape: Shape = (1, 28, 28), classes: int = 10) -> Network:
    """The network for images of `shape`: channels, height, width. All but cnn and cnn-bn import MXNet.

    MODULE:FUNCTION is called with the number of classes and returns a gluon HybridBlock that takes such images and
    gives logits. Raises InvalidSettings for an unknown network, images that it cannot take, and a function that fails.
    """
    check_name(name)
    if name in ("cnn", "cnn-bn"):
        from geomx_cli.runtime.training import cnn

        return cnn.network(shape, classes, normalised=name == "cnn-bn")
    from geomx_cli.runtime.training import gluon

    if name in _ZOO:
        return gluon.of_the_zoo(_ZOO[name].function, shape, classes, _ZOO[name].size)
    return gluon.of_a_person(name, shape, classes)
