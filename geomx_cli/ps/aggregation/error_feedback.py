"""What a codec has lost of one slice's arrays so far, and sends with later ones."""

import numpy as np

from geomx_cli.ps.aggregation.codec import LARGEST, Codec
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.kernels.vectorised import accumulate

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
        if self._residual is None:
            self._residual = np.zeros_like(array)
        if momentum and self._momentum is None:
            self._momentum = np.zeros_like(array)
        velocity = self._momentum if momentum else None
        add = codec.accumulate if array.dtype == np.float32 else accumulate
        none = np.empty(0, array.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            fits = add(array, momentum, none if velocity is None else velocity, decay, self._residual, LARGEST)
        if fits:
            return codec.extract(self._residual, velocity)
        if can_encode(array):
            self._residual = self._momentum = None
        return None


def can_encode(array: Array) -> bool:
    """Whether all elements are below LARGEST in magnitude, and none is NaN."""
    return not len(array) or bool(array.min() > -LARGEST and array.max() < LARGEST)
