"""int8: a quarter of the bytes of fp32, with error feedback.

In blocks of 256 elements the largest absolute value m becomes 127. With s = m / 127 an element x is sent as round(x /
s), to nearest even. It is decoded as that number times s. All of this is computed in fp32. The loss is added to the
next contribution.
"""

import numpy as np

from geomx_cli.ps.aggregation.codec import no_argument
from geomx_cli.ps.codecs._blocks import BlockCodec
from geomx_cli.ps.kernels import vectorised

__all__ = ["codec"]

name = "int8"


def codec(argument: str) -> "Int8":
    """Takes no argument. Raises InvalidSettings."""
    no_argument(name, argument)
    return Int8()


class Int8(BlockCodec):
    """The scales are m / 127 of each block, the codes int8."""

    name = name
    ratio = 4.0
    keeps_weights = True
    code, each = np.dtype(np.int8), 1
    kernels = (vectorised.int8_encode, vectorised.int8_decode)
