"""The interface to codecs, their specs, and the decoding of received payloads."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from geomx_cli.contract import codecs
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array, SliceArrays
from geomx_cli.ps.kernels import vectorised
from geomx_cli.ps.net.payload import DTYPES, Content, content
from geomx_cli.ps.net.wire import BadMessage, Form, Header

__all__ = [
    "LARGEST", "Codec", "Encoded", "SliceRound", "codec_at", "encoded", "exact_dtype", "no_argument", "parse_codec",
    "received", "with_numbers",
]  # fmt: skip

Encoded = tuple[memoryview, dict[str, Any]]
"""A payload and the header field that describes it: whether it has the elements (ENCODED) or their changes (CHANGE)."""
_FP32 = np.dtype(np.float32)
LARGEST = 2.0**114
"""Codecs with a residual or changes encode only elements below this. A sum of 2048 such elements is below 2^126, so it
is finite in float32, and the elements decoded from their rounded values are finite too.
"""


class Codec(ABC):
    """Base class of codecs, which encode the elements of a slice in fewer bytes. A codec is stateless, and only one
    loop's thread uses it.

    decay: factor for the residual (the part of a contribution that the encoding lost), which is added to the next
        contribution. 0 keeps no residual.
    momentum: coefficient of momentum correction with factor masking, see codecs/bsc.py; 0 for none.
    bears_momentum: whether training with gradients in this encoding converges if the optimizer has momentum.
    for_local_optimizers: whether training with gradients in this encoding is better if each worker runs the optimizer.
    results: whether results of rounds are sent as encoded values, as encoded changes of the values, or exact.
    union: whether a result has exactly the elements that were contributed to its round, instead of the elements that
        `encode` chooses. Such a codec has `only`.
    keeps_weights: whether each decoded element differs from the original by at most 1 % of the largest element beside
        it. Then weights can be sent, and not only gradients and differences.
    ratio: about how many times fewer bytes contributions and results have when encoded. Slices are longer by this
        factor, see Partition.
    accumulate: adds to residuals of float32, see kernels/vectorised.py. `prepare` may replace it by the compiled one.
    """

    decay: float = 0.0
    momentum: float = 0.0
    bears_momentum: bool = True
    for_local_optimizers: bool = False
    ratio: float = 1.0
    results: Literal["values", "changes", "exact"]
    union: bool = False
    keeps_weights: bool = False
    accumulate: Callable[[Array, float, Array, float, Array, float], bool] = staticmethod(vectorised.accumulate)

    def prepare(self) -> None:  # noqa: B027
        """Called in each process that encodes, before the first round."""

    def completed(self, spec: str, smallest: int) -> str:
        """The spec with the bound on the size of tensors, if this codec needs one and the spec has none."""
        return spec

    def at(self, size: int, round_: int) -> "Codec | None":
        """The codec for slices of a tensor of `size` elements in a round, the same at both ends; None for no codec."""
        return self

    def only(self, indices: Array) -> "Codec":
        """The codec that sends the elements at these indices, ascending, and zeros elsewhere. Codecs with `union` have
        it.
        """
        raise NotImplementedError

    @abstractmethod
    def encode(self, array: Array) -> memoryview:
        """Encode a 1-D array of float32 or float64 to a memoryview of bytes. The array is not modified. If `decay` is
        not 0, the magnitude of each element is below LARGEST.
        """

    @abstractmethod
    def decode(self, payload: memoryview, length: int) -> Array:
        """Decode to a new 1-D array of `length` float32 elements. Raises BadMessage for a payload that `encode` cannot
        produce.
        """

    def extract(self, array: Array, momentum: Array | None = None) -> memoryview:
        """Encode an array, and subtract from it what `decode` makes of the payload. In `momentum`, set the elements to
        0 that `decode` does not return as 0.
        """
        payload = self.encode(array)
        sent = self.decode(payload, len(array))
        array -= sent
        if momentum is not None:
            momentum[sent != 0] = 0
        return payload


def no_argument(name: str, argument: str) -> None:
    """Raise InvalidSettings if a codec that takes no argument gets one."""
    if argument:
        raise InvalidSettings(f"{name}:{argument}: {name} takes no argument", f"write {name}")


def with_numbers(name: str, argument: str, **usual: int) -> tuple[str, dict[str, int]]:
    """The parts of an argument FIRST[,NAME=N]..., each of which may be left out. Returns FIRST, and the whole numbers
    of all names in `usual`, which has the defaults. A plus may replace a comma. Raises InvalidSettings.
    """
    first, *words = argument.replace("+", ",").split(",")
    if "=" in first:
        first, words = "", [first, *words]
    found: dict[str, int] = {}
    for word in words:
        what, _, number = word.partition("=")
        if what not in usual or what in found or not (number.isascii() and number.isdigit()):
            hint = f"write {name}:{','.join(f'{each}={default}' for each, default in usual.items())}"
            raise InvalidSettings(f"{name}:{argument}: it does not take {word!r}", hint)
        found[what] = int(number)
    return first, usual | found


@dataclass(frozen=True, slots=True)
class SliceRound:
    """A slice in one round, for its codec.

    kept: the arrays that this process keeps with the slice.
    dtype: code of the slice's dtype.
    size: elements of the slice's tensor.
    round: number of the round, 0 for none.
    """

    kept: SliceArrays
    dtype: int = 0
    size: int = 0
    round: int = 0


@lru_cache(64)
def parse_codec(spec: str) -> Codec | None:
    """The codec for `--compress SPEC`, the same object for each call. Raises InvalidSettings where `codecs.parse` does,
    and for a plug-in that is no Codec.
    """
    made = codecs.parse(spec)
    if made is not None and not isinstance(made, Codec):
        raise InvalidSettings(f"the codec {spec} is no Codec", "derive its class from ps.aggregation.codec.Codec")
    return made


def codec_at(codec: Codec | None, size: int, round_: int) -> Codec | None:
    """The codec for slices of a tensor of this size in this round."""
    return None if codec is None else codec.at(size, round_)


def encoded(payload: memoryview, form: Form) -> Encoded:
    """The payload with the header field that describes it."""
    return payload, {"form": form}


def received(header: Header, payload: memoryview | None) -> Content:
    """Decode the content of a payload. With `form` CHANGE the content is the change. Raises BadMessage. Raises
    DamagedPayload for a payload that is not encoded and has a wrong size.
    """
    if header.form not in (Form.ENCODED, Form.CHANGE):
        return content(header, payload)
    try:
        codec = codec_at(parse_codec(header.codec), header.size, header.round)
    except InvalidSettings as error:
        raise BadMessage(error.message) from None
    if codec is None or payload is None:
        raise BadMessage("an encoded payload without a codec" if payload else "no payload where an encoded one belongs")
    try:
        array = codec.decode(payload, header.length)
    except BadMessage:
        raise
    except Exception as error:  # of an installed codec: a bad payload must not end this process
        raise BadMessage(f"a payload that {header.codec} cannot decode: {error!r}") from error
    if array.shape != (header.length,):
        raise BadMessage(f"{array.shape} elements from {header.codec} where {header.length} belong")
    return array.astype(exact_dtype(header.dtype), copy=False)


def exact_dtype(dtype: int) -> "np.dtype[Any]":
    """The dtype in which sums and changes of such slices are computed."""
    return np.promote_types(DTYPES[dtype], _FP32)
