"""What a codec has lost of one slice's arrays so far, and sends with later ones."""

import numpy as np

from geomx_cli.ps.aggregation.codec import LARGEST, Codec
from geomx_cli.ps.arrays import Array

__all__ = ["ErrorFeedback", "can_encode"]


class ErrorFeedback:
    """The residual of one slice, and with momentum correction (codecs/bsc.py) its momentum."""

    def __init__(self) -> None:
        self._residual: Array | None = None
        self._momentum: Array | None = None

    def encode(self, codec: Codec, array: Array, *, decay: float = 1.0, momentum: float = 0.0) -> memoryview | None:
        """Encode the array, a party's contribution or a sum, together with `decay` times what was lost before.

        None if the array has to be sent as it is: if it cannot be encoded, which leaves the residual as it was, or if
        the residual has grown too large, as training diverges, which drops it.
        """
        real = array.dtype.type
        residual = np.zeros_like(array) if self._residual is None else self._residual
        speed = None
        with np.errstate(over="ignore", invalid="ignore"):
            if momentum:
                speed = array + (0 if self._momentum is None else self._momentum * real(momentum))
            total = residual * real(decay) if decay != 1 else residual
            total = total + (array if speed is None else speed)
        if can_encode(total):
            self._residual, self._momentum = total, speed
            return codec.extract(total, speed)
        if can_encode(array):
            self._residual = self._momentum = None
        return None


def can_encode(array: Array) -> bool:
    """Whether all elements are below LARGEST in magnitude, and none is NaN."""
    return not len(array) or bool(array.min() > -LARGEST and array.max() < LARGEST)
