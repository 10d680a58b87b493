"""Networks that are gluon blocks: the small `cnn` and `cnn-bn`, networks of the model zoo, and a user's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.mxnet.gluon_model import Built, GluonModel, session
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.plugin_factory import new_each_time
from geomx_cli.runtime.training.architecture import Parameter, Shape, cnn
from geomx_cli.runtime.training.model import Network

__all__ = ["network"]

_ONES = ("gamma", "running_var")
_RUNNING = ("running_mean", "running_var")


@dataclass(frozen=True)
class _Zoo:
    """A network of gluon's model zoo. size: expected height and width of images; 0 for any."""

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


def network(name: str, shape: Shape, classes: int) -> Network:
    """See Frontend.network. All but cnn and cnn-bn import MXNet."""
    if name in ("cnn", "cnn-bn"):
        return _cnn_network(shape, classes, normalised=name == "cnn-bn")
    found = _ZOO.get(name)
    return _user_network(name, shape, classes) if found is None else _zoo_network(found, shape, classes)


def _zoo_network(zoo: _Zoo, shape: Shape, classes: int) -> Network:
    """Return a network of mxnet.gluon.model_zoo.vision. Images are resized to `zoo.size` x `zoo.size`, unless that is
    0.

    The first layers are the layers for ImageNet: ResNets begin with a 7 x 7 convolution and pooling.
    """

    def make(mx: Any) -> Any:
        return getattr(mx.gluon.model_zoo.vision, zoo.function)(classes=classes)

    return _network(make, shape, classes, (zoo.size, zoo.size) if zoo.size else shape[1:], zoo.function)


def _user_network(name: str, shape: Shape, classes: int) -> Network:
    """Wrap the block that MODULE:FUNCTION returns. The function is called again for each copy."""
    new_block = new_each_time(name, "--network", "block")

    def make(mx: Any) -> Any:
        block = new_block(classes)
        if not isinstance(block, mx.gluon.HybridBlock):
            what = f"it returned {type(block).__name__}, no gluon HybridBlock"
            raise InvalidSettings(f"--network {name}: {what}", "return a block such as gluon.nn.HybridSequential")
        return block

    return _network(make, shape, classes, shape[1:], name)


def _network(
    make: Callable[[Any], Any], shape: Shape, classes: int, size: tuple[int, int], name: str
) -> Network:
    mx = load_mxnet()
    body = _built(mx, make, shape, classes, size, name)[1]
    trained, running = _parameters(body)
    return Network(
        shape, classes,
        tuple(Parameter(key, item.shape, _start(key, item.shape)) for key, item in trained.items()),
        tuple(Parameter(key, item.shape, _start(key, item.shape)) for key, item in running.items()),
        size, lambda network: _build(network, make, name), session,
    )  # fmt: skip


def _build(network: Network, make: Callable[[Any], Any], name: str) -> GluonModel:
    block, body = _built(load_mxnet(), make, network.shape, network.classes, network.resized, name)
    trained, running = _parameters(body)
    return GluonModel(network, Built(block, list(trained.values()), list(running.values())))


def _built(
    mx: Any, make: Callable[[Any], Any], shape: Shape, classes: int, size: tuple[int, int], name: str
) -> tuple[Any, Any]:
    """Return the block that takes images of `shape`, and the network within it. The shapes of all tensors are known."""
    body = make(mx)
    block = body if size == shape[1:] else _resizing(mx, body, size)
    block.initialize(mx.init.Zero(), force_reinit=True)
    block.hybridize(static_alloc=True, static_shape=True)
    try:
        scores = block(mx.nd.zeros((1, *shape))).shape
    except Exception as error:  # any error of a block on images it was not designed for
        reason = (str(error).strip().splitlines() or [type(error).__name__])[-1]
        hint = "choose another --network or --data"
        raise InvalidSettings(f"the network {name} cannot take images of shape {shape}: {reason}", hint) from None
    if scores != (1, classes):
        hint = f"let it end in a dense layer of {classes}, as many as it is called with"
        raise InvalidSettings(f"the network {name} makes {scores} of one image, not (1, {classes})", hint)
    return block, body


def _resizing(mx: Any, body: Any, size: tuple[int, int]) -> Any:
    """Return `body` behind bilinear upscaling. To resize on the device is cheaper than to transfer larger batches."""

    class Resizing(mx.gluon.HybridBlock):  # type: ignore[misc]  # mxnet has no types
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def hybrid_forward(self, F: Any, images: Any) -> Any:  # noqa: N803  # MXNet's name
            height, width = size
            return self.body(F.contrib.BilinearResize2D(images, height=height, width=width))

    return Resizing()


def _parameters(block: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the trained parameters and the running statistics, by names independent of the process's other blocks.

    A parameter shared by two layers counts once. Unused scales and shifts stay one and zero.
    """
    trained: dict[str, Any] = {}
    running: dict[str, Any] = {}
    for name, parameter in block._collect_params_with_prefix().items():
        kind = name.rpartition(".")[2]
        table = trained if parameter.grad_req != "null" else running if kind in _RUNNING else None
        if table is not None and not any(parameter is known for known in table.values()):
            table[name] = parameter
    return trained, running


def _start(name: str, shape: tuple[int, ...]) -> float | None:
    if len(shape) > 1:
        return None
    return float(name.rpartition(".")[2] in _ONES)


def _cnn_network(shape: Shape, classes: int, *, normalised: bool) -> Network:
    """Return `cnn`, or `cnn-bn`; the master worker needs no MXNet for them."""
    found = cnn(shape, classes, normalised=normalised)
    return Network(shape, classes, found.parameters, found.statistics, found.resized, _build_cnn, session)


def _build_cnn(network: Network) -> GluonModel:
    mx = load_mxnet()
    nn = mx.gluon.nn
    block: Any = nn.HybridSequential()
    trained: list[Any] = []
    running: list[Any] = []
    shapes = [parameter.shape for parameter in network.parameters]
    for channels, inputs, *kernel in (shape for shape in shapes if len(shape) == 4):
        layer = nn.Conv2D(channels, tuple(kernel), in_channels=inputs)
        block.add(layer)
        trained += [layer.weight, layer.bias]
        if network.statistics:
            norm = nn.BatchNorm(in_channels=channels)
            block.add(norm)
            trained += [norm.gamma, norm.beta]
            running += [norm.running_mean, norm.running_var]
        block.add(nn.Activation("relu"), nn.MaxPool2D(2, 2))
    block.add(nn.Flatten())
    dense = [shape for shape in shapes if len(shape) == 2]
    for index, (outputs, inputs) in enumerate(dense):
        activation = None if index == len(dense) - 1 else "relu"
        layer = nn.Dense(outputs, in_units=inputs, activation=activation)
        block.add(layer)
        trained += [layer.weight, layer.bias]
    block.initialize(mx.init.Zero())
    block.hybridize(static_alloc=True, static_shape=True)
    return GluonModel(network, Built(block, trained, running))
