"""topk:RATIO[,VALUES][,pull=topk|union][,warmup=N][,min=N]: only the largest elements, with error feedback (Stich et
al., arXiv:1809.07599).

Of n elements the ceil(RATIO n) elements of largest magnitude are sent. Their indices are gaps of one or two bytes.
Their values are encoded by the codec VALUES (fp16, the default, bf16, int8, q4) or unencoded (fp32). All other elements
are added to the next contribution.

pull: which elements a result has. `topk`, the default: the largest ones, as many as a contribution. The others follow
    in later rounds. `union`: all elements that a party has contributed to the round, so a result grows with the number
    of parties.
warmup: in round r of the first N the ratio is RATIO^((r - 1) / N): 1 in the first round, then falling geometrically.
min: tensors of fewer elements are sent unencoded; --compress-min by default.
"""

import copy
import math
from typing import TYPE_CHECKING

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import plain_number
from geomx_cli.ps.aggregation.codec import Codec
from geomx_cli.ps.codecs import bf16, fp16, int8, q4
from geomx_cli.ps.codecs._sparse import SelectingCodec, decode_indices, encode_indices
from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["TopK", "codec"]

name = "topk"
_COUNT = np.dtype("<u4")
_VALUES = {"fp16": fp16, "bf16": bf16, "int8": int8, "q4": q4, "fp32": None}


def codec(argument: str) -> "TopK":
    """Parse RATIO, VALUES and parameters. A plus may replace a comma. Raises InvalidSettings."""
    return TopK(argument, "topk")


class TopK(SelectingCodec):
    """The payload: the number of elements as uint32, the indices, the values.

    smallest: elements of the smallest tensor that is made sparse; None until the spec is completed.
    small: the codec for smaller tensors; None for none.
    """

    decay = 1.0
    for_local_optimizers = True
    results = "changes"
    smallest: int | None = None
    small: Codec | None = None
    _only: "Array | None" = None

    def __init__(self, argument: str, what: str) -> None:
        ratio, *words = argument.replace("+", ",").split(",")
        self._what = f"{what}:{argument}" if argument else what
        try:
            self._ratio = float(plain_number(ratio))
        except ValueError:
            self._ratio = 0.0
        if not 0 < self._ratio <= 1:
            wrong = f"{self._what}: {ratio!r} is no ratio" if ratio else f"{self._what} needs a ratio"
            raise InvalidSettings(wrong, f"write {what}:0.01 for 1 %")
        values = words.pop(0) if words and "=" not in words[0] else ""
        if (values or "fp16") not in _VALUES:
            raise InvalidSettings(f"{self._what}: no values of {values!r}", f"choose from {', '.join(_VALUES)}")
        made = _VALUES[values or "fp16"]
        self._values: Codec | None = None if made is None else made.codec("")
        params = dict(word.partition("=")[::2] for word in words)
        pull = params.pop("pull", "topk")
        if pull not in ("topk", "union"):
            raise InvalidSettings(f"{self._what}: no pull={pull}", "write pull=topk or pull=union")
        self.union = pull == "union"
        self._warmup = self._whole(params.pop("warmup", "0"))
        if "min" in params:
            self.smallest = self._whole(params.pop("min"))
        if params or len(words) > len({word.partition("=")[0] for word in words}):
            wrong = ",".join([word for word in words if word.partition("=")[0] in params] or words)
            hint = f"write {what}:RATIO,VALUES,pull=union,warmup=N,min=N; all but RATIO may be left out"
            raise InvalidSettings(f"{self._what}: it does not take {wrong!r}", hint)
        self._varies = self.union or self._warmup > 0
        """Whether the number of elements differs from ceil(RATIO n) in some results."""
        self.ratio = max(1.0, 1 / self._ratio)

    def _whole(self, text: str) -> int:
        if not (text.isascii() and text.isdigit()):
            raise InvalidSettings(f"{self._what}: {text!r} is no number of rounds or elements", "write digits, as in 4")
        return int(text)

    def prepare(self) -> None:
        """See Codec."""
        super().prepare()
        for inner in (self._values, self.small):
            if inner is not None:
                inner.prepare()

    def completed(self, spec: str, smallest: int) -> str:
        """See Codec."""
        return spec if self.smallest is not None else f"{spec},min={smallest}"

    def at(self, size: int, round_: int) -> Codec | None:
        """See Codec."""
        if size < (self.smallest or 0):
            return self.small
        if not self._warmup or round_ > self._warmup:
            return self
        warming = copy.copy(self)
        warming._ratio = self._ratio ** (max(round_ - 1, 0) / self._warmup)
        return warming

    def only(self, indices: "Array") -> Codec:
        """See Codec."""
        chosen = copy.copy(self)
        chosen._only = indices
        return chosen

    def select(self, array: "Array") -> "tuple[memoryview, Array, Array]":
        """See SelectingCodec."""
        indices = self.largest(array, math.ceil(len(array) * self._ratio)) if self._only is None else self._only
        sent = array[indices].astype(np.float32, copy=False)
        if self._values is None:
            values = memoryview(sent.astype("<f4").tobytes())
        else:
            values = self._values.encode(sent)
            sent = self._values.decode(values, len(sent))
        head = np.array([len(indices)], _COUNT).tobytes()
        return memoryview(head + encode_indices(indices, len(array)).tobytes() + bytes(values)), indices, sent

    def decode(self, payload: memoryview, length: int) -> "Array":
        """See Codec."""
        if len(payload) < _COUNT.itemsize:
            raise BadMessage(f"{len(payload)} bytes of {length} sparse elements")
        count = int(np.frombuffer(payload, _COUNT, 1)[0])
        if count > length or (count != math.ceil(length * self._ratio) and not self._varies):
            raise BadMessage(f"{count} of {length} elements")
        indices, rest = decode_indices(payload[_COUNT.itemsize :], count, length)
        if self._values is not None:
            values = self._values.decode(rest, count)
        elif len(rest) != 4 * count:
            raise BadMessage(f"{len(rest)} bytes of {count} values")
        else:
            values = np.frombuffer(rest, "<f4")
        if not np.isfinite(values).all():
            raise BadMessage("sparse elements that are not finite")
        array = np.zeros(length, np.float32)
        array[indices] = values
        return array
