"""The networks that the bundled training job knows by name.

For `linear` and `cnn` their tensors come without a framework, so the master worker, which only hands initial weights to
the global servers, needs none. Weights are always drawn in numpy: no framework's random numbers decide where a job
starts.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from geomx_cli.runtime.training.architecture import Shape
from geomx_cli.runtime.training.catalog import check_network
from geomx_cli.runtime.training.network import Network

__all__ = ["find"]


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


def find(name: str, shape: Shape = (1, 28, 28), classes: int = 10) -> Network:
    """The network for images of `shape`: channels, height, width. All but linear, cnn and cnn-bn import MXNet.

    MODULE:FUNCTION is called with the number of classes and returns a gluon HybridBlock that takes such images and
    gives logits. Raises InvalidSettings for an unknown network, images that it cannot take, and a function that fails.
    """
    check_network(name)
    if name == "linear":
        from geomx_cli.runtime.training import linear

        return linear.network(shape, classes)
    if name in ("cnn", "cnn-bn"):
        from geomx_cli.runtime.training import cnn

        return cnn.network(shape, classes, normalised=name == "cnn-bn")
    from geomx_cli.runtime.training import gluon

    if name in _ZOO:
        return gluon.zoo_network(_ZOO[name].function, shape, classes, _ZOO[name].size)
    return gluon.user_network(name, shape, classes)
