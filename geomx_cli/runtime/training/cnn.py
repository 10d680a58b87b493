"""The architecture of the small network `cnn`, and of `cnn-bn`, the same with batch normalization."""

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.training.architecture import Architecture, Parameter, Shape

__all__ = ["cnn"]

CHANNELS = (16, 32)
HIDDEN = (256, 128)
KERNEL = 5


def cnn(shape: Shape, classes: int, *, normalised: bool) -> Architecture:
    """Two unpadded 5 x 5 convolutions, each followed by ReLU and pooling that halves the size, then three dense layers.

    28 x 28 images yield 32 channels of 4 x 4 before the dense layers. Raises InvalidSettings for images that are too
    small.
    """
    channels, height, width = shape
    left = [_left(extent) for extent in (height, width)]
    if min(left) < 1:
        hint = "give images of 16 x 16 or larger, or choose another --network"
        raise InvalidSettings(f"the network cnn cannot take images of {height} x {width}", hint)
    layers: list[tuple[Parameter, ...]] = []
    norms: list[tuple[Parameter, ...]] = []
    for number, (outputs, inputs) in enumerate(zip(CHANNELS, (channels, *CHANNELS), strict=False), 1):
        layers += [_layer(f"conv{number}", (outputs, inputs, KERNEL, KERNEL))]
        if normalised:
            layers += [(Parameter(f"norm{number}.gamma", (outputs,), 1.0), Parameter(f"norm{number}.beta", (outputs,)))]
            norms += [
                (Parameter(f"norm{number}.mean", (outputs,)), Parameter(f"norm{number}.variance", (outputs,), 1.0))
            ]
    inputs = CHANNELS[-1] * left[0] * left[1]
    for number, outputs in enumerate((*HIDDEN, classes), 1):
        layers += [_layer(f"dense{number}", (outputs, inputs))]
        inputs = outputs
    parameters, statistics = (tuple(item for pair in pairs for item in pair) for pairs in (layers, norms))
    return Architecture(shape, classes, parameters, statistics, (height, width))


def _left(extent: int) -> int:
    for _ in CHANNELS:
        extent = (extent - KERNEL + 1) // 2
    return extent


def _layer(name: str, shape: tuple[int, ...]) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.weight", shape, None), Parameter(f"{name}.bias", shape[:1])
