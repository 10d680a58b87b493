"""q4: an eighth of the bytes of fp32, with error feedback.

In blocks of 256 elements with the largest absolute value m, an element is a sign and a level L. L is 0 if its absolute
value is below 2^-6.5 m. Otherwise it is the number from 1 to 7 for which 2^(L - 7) m is logarithmically nearest. The
loss is added to the next contribution.
"""

import numpy as np

from geomx_cli.ps.aggregation.codec import no_argument
from geomx_cli.ps.codecs._blocks import BlockCodec
from geomx_cli.ps.kernels import vectorised

__all__ = ["codec"]

name = "q4"


def codec(argument: str) -> "Q4":
    """Takes no argument. Raises InvalidSettings."""
    no_argument(name, argument)
    return Q4()


class Q4(BlockCodec):
    """The scales are each block's m. A byte has two codes, the first one in its low bits."""

    name = name
    ratio = 8.0
    code, each = np.dtype(np.uint8), 2
    kernels = (vectorised.q4_encode, vectorised.q4_decode)
