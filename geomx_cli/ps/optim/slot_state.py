"""An optimizer's state of one slot, and all of it as named arrays to save and load."""

import bisect
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import msgspec
import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array

__all__ = [
    "PIECE", "SerializedArrays", "Slot", "SlotState", "WORK", "deserialize", "digest", "export_states",
    "import_states",
]  # fmt: skip

# Serializes named arrays into bytes, sent in pieces and validated before use. The format is the length of an index (8
# bytes, little endian), the index (msgpack: name, dtype and size of each array), and the arrays' contents,
# concatenated.

PIECE = 2 * 2**20
"""Bytes in a piece: a long one would keep whatever else two processes say waiting."""

_DTYPES = ("<i8", "<f4", "<f8")
_PREFIX = 8
_ENTRY = 96  # bytes of an array in the index, at most: names are short
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[tuple[str, str, int]])


class SerializedArrays:
    """1-D arrays of int64, float32 or float64, `size` bytes in all. The arrays must not change while in use."""

    def __init__(self, named: Mapping[str, Array]) -> None:
        arrays = [np.ascontiguousarray(array) for array in named.values()]
        index = _encoder.encode([(n, a.dtype.str, a.size) for n, a in zip(named, arrays, strict=True)])
        parts: list[Any] = [len(index).to_bytes(_PREFIX, "little"), index, *(array.data for array in arrays)]
        self._parts = [memoryview(part).cast("B") for part in parts]
        self._starts = list(itertools.accumulate(map(len, self._parts), initial=0))
        self.size = self._starts[-1]

    def piece(self, start: int) -> bytes:
        """The bytes from `start` on, at most PIECE."""
        found, end = bytearray(), min(start + PIECE, self.size)
        at = start
        while at < end:
            number = bisect.bisect_right(self._starts, at) - 1
            part = self._parts[number][at - self._starts[number] :][: end - at]
            found += part
            at += len(part)
        return bytes(found)

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """The offset and bytes of each piece."""
        for start in range(0, self.size, PIECE):
            yield start, self.piece(start)

    def digest(self) -> str:
        """The SHA-256 of the whole archive, as `digest` computes it."""
        found = hashlib.sha256()
        for part in self._parts:
            found.update(part)
        return found.hexdigest()


def digest(run: bytes | bytearray) -> str:
    """The SHA-256 of a whole archive."""
    return hashlib.sha256(run).hexdigest()


def deserialize(run: bytes | bytearray, most: int | None = None) -> dict[str, Array]:
    """The arrays of a whole archive, sharing its memory. Raises InvalidSettings if it is malformed, or of more than
    `most` arrays.
    """
    end = _PREFIX + int.from_bytes(run[:_PREFIX], "little")
    if most is not None and end - _PREFIX > most * _ENTRY + _PREFIX:
        raise InvalidSettings(f"state with an index of {end - _PREFIX} bytes: there are at most {most} arrays")
    try:
        index = _decoder.decode(memoryview(run)[_PREFIX:end])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"state that cannot be read: {error}") from None
    if not all(dtype in _DTYPES and size >= 0 for _, dtype, size in index):
        raise InvalidSettings("state with arrays of other dtypes than int64, float32 and float64")
    sizes = [np.dtype(dtype).itemsize * size for _, dtype, size in index]
    if end + sum(sizes) != len(run):
        raise InvalidSettings(f"state of {len(run)} bytes, which its index does not describe")
    named, offset = {}, end
    for (name, dtype, size), length in zip(index, sizes, strict=True):
        named[name] = np.frombuffer(run, dtype, size, offset)
        offset += length
    return named


Slot = tuple[int, int]
WORK = {np.dtype(t): np.dtype(w) for t, w in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"))}
"""The dtype in which weights of each dtype are updated."""
_NAME = re.compile(r"([0-9]+)/([0-9]+)/([a-z]+(?:\.(?:0|[1-9][0-9]*))?)")


class _Kind(Protocol):
    """A class of optimizers: its name, and the names of the arrays of a slot. See Optimizer."""

    name: ClassVar[str]
    required: ClassVar[tuple[str, ...]]
    occasional: ClassVar[tuple[str, ...]]
    by_member: ClassVar[tuple[str, ...]]


@dataclass(slots=True)
class SlotState:
    """The number of updates, flat arrays of the working dtype, and for fp16 weights an fp32 master.

    An array of a single member is called `what.member`, as in "backup.1".
    """

    step: int = 0
    master: Array | None = None
    arrays: dict[str, Array] = field(default_factory=dict)

    @classmethod
    def start(cls, weight: Array) -> "SlotState":
        """The state before the first update of this weight."""
        work = WORK[weight.dtype]
        return cls(master=None if weight.dtype == work else weight.astype(work).reshape(-1))

    def fits(self, weight: Array) -> bool:
        """Whether this is the state of a weight of this dtype and size."""
        work = WORK[weight.dtype]
        named = self.named().values()
        return (self.master is None) == (weight.dtype == work) and all(
            array.size == weight.size and array.dtype == work for array in named
        )

    def exact(self, weight: Array) -> Array:
        """The weight in the working dtype, flat."""
        return weight.reshape(-1) if self.master is None else self.master

    def named(self) -> dict[str, Array]:
        """All arrays, by name."""
        return self.arrays if self.master is None else {"master": self.master, **self.arrays}


def export_states(states: Mapping[Slot, SlotState]) -> dict[str, Array]:
    """Copies of all arrays, named "key/slice/what"; `step` is int64 of shape (1,)."""
    named: dict[str, Array] = {}
    for (key, index), state in sorted(states.items()):
        named[f"{key}/{index}/step"] = np.array([state.step], np.int64)
        named |= {f"{key}/{index}/{what}": array.copy() for what, array in state.named().items()}
    return named


def import_states(named: Mapping[str, Array], kind: _Kind) -> dict[Slot, SlotState]:
    """The states of which `export_states` returned these arrays, as copies. Raises InvalidSettings if they are not the
    whole state of such an optimizer.
    """
    slots: dict[Slot, dict[str, Array]] = {}
    for name, array in named.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise InvalidSettings(f"{name!r} does not name optimizer state", 'as in "3/0/step"')
        slots.setdefault((int(match[1]), int(match[2])), {})[match[3]] = array
    return {slot: _import_slot(slot, arrays, kind) for slot, arrays in slots.items()}


def _import_slot(slot: Slot, named: dict[str, Array], kind: _Kind) -> SlotState:
    known = {"master", *kind.required, *kind.occasional}
    arrays = {what: array.copy() for what, array in named.items() if what != "step"}
    step = named.get("step")
    good = step is not None and step.shape == (1,) and step.dtype.kind == "i" and step[0] >= 0
    own = {what for what in arrays if "." in what}
    members = {what.partition(".")[2] for what in own}
    whole = set(kind.required) <= arrays.keys() - own <= known
    whole = whole and own == {f"{what}.{member}" for what in kind.by_member for member in members}
    alike = len({(array.dtype, array.shape) for array in arrays.values()}) <= 1
    alike = alike and all(array.ndim == 1 and array.dtype in WORK.values() for array in arrays.values())
    if step is None or not (good and whole and alike):
        found, need = ", ".join(sorted(named)), ", ".join(("step", *kind.required))
        message = f"slot {slot[0]}/{slot[1]} has no state of {kind.name} in ({found})"
        raise InvalidSettings(message, f"it needs {need}, of one size and dtype")
    return SlotState(int(step[0]), arrays.pop("master", None), arrays)
