"""The architecture of the network `gpt`: a small GPT-2 over characters."""

import math

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.training.architecture import Architecture, Parameter, Shape

__all__ = ["HEAD", "gpt"]

HEAD = 64
"""Width of an attention head."""
_DEVIATION = 0.02


def gpt(shape: Shape, classes: int, layers: int, width: int) -> Architecture:
    """A decoder of `layers` blocks, each of causal self-attention and an MLP of four times the width, both after layer
    normalization; learned positions; the embedding also makes the scores. shape: (1, 1, context).

    Radford et al., "Language models are unsupervised multitask learners", 2019: weights are normal with a standard
    deviation of 0.02, and of 0.02 / sqrt(2 layers) where a block adds to the residual. Without dropout.
    Raises InvalidSettings for a width that heads of 64 cannot share.
    """
    if width % HEAD:
        hint = f"write {-(-width // HEAD) * HEAD}: each attention head has {HEAD}"
        raise InvalidSettings(f"--width {width} is no multiple of {HEAD}", hint)
    found = [
        Parameter("embedding.weight", (classes, width), None, _DEVIATION),
        Parameter("positions.weight", (shape[2], width), None, _DEVIATION),
    ]
    last = _DEVIATION / math.sqrt(2 * layers)
    for number in range(1, layers + 1):
        block = f"block{number}"
        found += [
            *_norm(f"{block}.norm1", width),
            *_layer(f"{block}.attention", (3 * width, width), _DEVIATION),
            *_layer(f"{block}.projection", (width, width), last),
            *_norm(f"{block}.norm2", width),
            *_layer(f"{block}.dense1", (4 * width, width), _DEVIATION),
            *_layer(f"{block}.dense2", (width, 4 * width), last),
        ]
    return Architecture(shape, classes, (*found, *_norm("norm", width)), (), (1, shape[2]))


def _norm(name: str, width: int) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.gamma", (width,), 1.0), Parameter(f"{name}.beta", (width,))


def _layer(name: str, shape: tuple[int, int], deviation: float) -> tuple[Parameter, Parameter]:
    return Parameter(f"{name}.weight", shape, None, deviation), Parameter(f"{name}.bias", shape[:1])
