"""The base class of optimizers: it updates a slice block by block. The rules (SGD, Adam, ...) are in `optimizers.py`.

An optimizer keeps nothing of a slice itself. Its arrays belong to the slice, or to the worker that updates one vector:

step: the number of updates, int64 of shape (1,).
master: for fp16 weights, the fp32 weights.
mean, momentum, ...: the rule's own arrays, flat and in the working dtype. The name of an array for a single member ends
    in the member's rank: "backup.1".
"""

import bisect
import hashlib
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array, Arrays
from geomx_cli.ps.net.payload import Rows
from geomx_cli.ps.optim.schedules import MULTIPLIERS, Field, Schedule, Value, checked

__all__ = [
    "Call", "LocalOptimizer", "Optimizer", "PIECE", "SerializedArrays", "add_decay", "average", "average_of_square",
    "average_square", "clip", "deserialize", "digest", "product", "rest",
]  # fmt: skip

# Named arrays as one run of bytes, sent in pieces and validated before use. The format is the length of an index (8
# bytes, little endian), the index (msgpack: name, dtype and size of each array), and the arrays' contents,
# concatenated.

PIECE = 2 * 2**20
"""Bytes in a piece. A longer piece would delay all other messages between the two processes."""

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
    """The arrays of a whole archive, sharing its memory. Raises InvalidSettings if it is malformed, or has more than
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


WORK = {np.dtype(t): np.dtype(w) for t, w in (("f2", "f4"), ("f4", "f4"), ("f8", "f8"))}
"""The dtype in which weights of each dtype are updated."""
_NAME = re.compile(r"([0-9]+)/([0-9]+)/([a-z]+(?:\.(?:0|[1-9][0-9]*))?)")

# In-place operations on a block, shared by optimizers; in the block's dtype, with `temp` as scratch.


def clip(values: Array, limit: float) -> None:
    """Limit values to ±`limit` if that is above 0."""
    if limit > 0.0:
        np.minimum(values, limit, out=values)
        np.maximum(values, -limit, out=values)


def add_decay(g: Array, old: Array, wd: float, temp: Array) -> None:
    """g <- g + wd * old."""
    if wd:
        np.multiply(old, wd, out=temp)
        np.add(g, temp, out=g)


def rest(rate: float, like: Array) -> float:
    """1 - rate, with the rate rounded to the working dtype, as in MXNet. So 1 - 0.999 becomes 4.7e-5 larger."""
    return 1.0 - float(like.dtype.type(rate))


def product(a: float, b: float, like: Array) -> float:
    """a * b in the working dtype."""
    kind = like.dtype.type
    return float(kind(a) * kind(b))


def average(mean: Array, rate: float, share: float, value: Array, temp: Array) -> None:
    """mean <- rate * mean + share * value."""
    np.multiply(value, share, out=temp)
    np.multiply(mean, rate, out=mean)
    np.add(mean, temp, out=mean)


def average_square(mean: Array, rate: float, share: float, value: Array, temp: Array) -> None:
    """mean <- rate * mean + share * value * value."""
    np.multiply(value, share, out=temp)
    np.multiply(temp, value, out=temp)
    np.multiply(mean, rate, out=mean)
    np.add(mean, temp, out=mean)


def average_of_square(mean: Array, rate: float, share: float, value: Array, temp: Array) -> None:
    """mean <- rate * mean + share * (value * value)."""
    np.multiply(value, value, out=temp)
    np.multiply(temp, share, out=temp)
    np.multiply(mean, rate, out=mean)
    np.add(mean, temp, out=mean)


# A block of each operand and of the scratch fits in the level 2 cache: 1.5 times faster than whole slices.
_BLOCK = 32768


@dataclass(frozen=True, slots=True)
class Call:
    """The arguments that are the same for all blocks of one update."""

    step: int
    lr: float
    wd: float
    clip: float


class Optimizer(ABC):
    """Updates slices, whose arrays it is given (see the module).

    required: names of the arrays that a slice always has.
    occasional: arrays that a slice has only while the hyper-parameters need them.
    by_member: arrays that a slice has once for each member that has contributed.
    seen: arrays in `by_member` that hold the weights last sent to the member.

    Arithmetic is element by element, in fp32 for fp16 and fp32 weights, and in fp64 for fp64 weights. So the bits do
    not depend on how a tensor is cut into slices. Infinite and NaN gradients pass silently. Not thread-safe. A call
    that raises InvalidSettings has changed nothing.
    """

    name: ClassVar[str]
    fields: ClassVar[Mapping[str, Field]]
    required: ClassVar[tuple[str, ...]] = ()
    occasional: ClassVar[tuple[str, ...]] = ()
    by_member: ClassVar[tuple[str, ...]] = ()
    seen: ClassVar[tuple[str, ...]] = ()

    def __init__(self, params: Mapping[str, Value | None], schedule: Schedule | None = None) -> None:
        self._set: dict[str, float | bool] = {name: field.default for name, field in self.fields.items()}
        self._params = self._set
        self._multipliers = (1.0, 1.0)
        self._schedule = self._followed = schedule
        self._scratch: dict[np.dtype[Any], tuple[Array, Array]] = {}
        self.set(**params)

    @property
    def params(self) -> dict[str, Value]:
        """All hyper-parameters of the latest update, including defaults. `create(name, params)` makes an optimizer with
        them. If a schedule gives the learning rate, they contain the set learning rate.
        """
        return dict(self._params)

    def set(self, /, **params: Value | None) -> None:
        """Change hyper-parameters from the next update on. First check all, then change them.

        A slice keeps its arrays, except arrays that the new hyper-parameters do not need (`momentum=0`). The slice's
        next update drops these, and starts newly needed arrays at zero.
        """
        self._set.update(checked(self.name, params, self.fields))
        self._params = self._set

    def tune(self, hyper: Mapping[str, Value]) -> None:
        """Override the set hyper-parameters for the next updates, until the next `tune` or `set`.

        They may include the tensor's own `lr_mult` and `wd_mult`, which are otherwise 1. A `learning_rate` overrides
        the schedule. Raises the same errors as `set`.
        """
        own = checked(self.name, hyper, {**self.fields, **MULTIPLIERS})
        self._multipliers = (float(own.pop("lr_mult", 1.0)), float(own.pop("wd_mult", 1.0)))
        self._followed = None if "learning_rate" in own else self._schedule
        self._params = {**self._set, **own} if own else self._set

    def update(self, state: Arrays, weight: Array, grad: Array, *, member: int = 0) -> Array:
        """The new weight: a new array of the weight's shape and dtype (fp16, fp32 or fp64).

        state: the optimizer's arrays of this slice, empty before its first update. They are changed in place. An fp16
            slice continues from its `master`, not from `weight`. After setting a weight by other means, clear the
            state.
        grad: has the weight's shape and any of the three dtypes. Neither is written to.
        member: the rank of the party (in a flat plane: worker) that contributed `grad`; 0 if it is the sum of all.
        """
        if grad.shape != weight.shape:
            what = f"a gradient of {grad.dtype}{grad.shape} and a weight of {weight.dtype}{weight.shape}"
            raise InvalidSettings(f"{self.name} cannot take {what}", "it takes equal shapes of floats")
        call, arrays = self._count(state, weight, grad, member)
        result = np.empty(weight.shape, weight.dtype)
        self._run(self._step, call, state.get("master"), arrays, weight, grad, result)
        return result

    def update_rows(self, state: Arrays, weight: Array, grad: Rows, *, member: int = 0) -> "Rows | Array":
        """Like `update`, with a gradient that is zero except for some rows. `weight` is 1-D, of whole rows.

        A lazy rule changes only those rows, in the weight and in the slice's arrays, and returns their new values;
        every other rule changes all elements and returns the new weight.
        """
        call, arrays = self._count(state, weight, grad.values, member)
        if not self._lazy:
            result = np.empty_like(weight)
            self._run(self._step_of_rows, call, state.get("master"), arrays, weight, grad.dense(weight.size), result)
            return result
        return self._run_rows(call, state.get("master"), arrays, weight, grad)

    def _run_rows(self, call: Call, master: Array | None, arrays: list[Array], weight: Array, grad: Rows) -> Rows:
        """Like `_run`, for some rows of everything."""
        touched = [Rows.of(array, grad.row, grad.numbers) for array in arrays]
        exact = None if master is None else Rows.of(master, grad.row, grad.numbers)
        old = Rows.of(weight, grad.row, grad.numbers).values
        result, flat = np.empty_like(old), [rows.values.reshape(-1) for rows in touched]
        flat_master = None if exact is None else exact.values.reshape(-1)
        self._run(self._step_of_rows, call, flat_master, flat, old, grad.values, result)
        for array, rows in zip(arrays, touched, strict=True):
            rows.write_to(array)
        if master is not None and exact is not None:
            exact.write_to(master)
        return Rows(grad.numbers, result)

    def _count(self, state: Arrays, weight: Array, grad: Array, member: int) -> tuple[Call, list[Array]]:
        """Count an update of the slice and prepare the arrays that it needs."""
        if weight.dtype not in WORK or grad.dtype not in WORK:
            what = f"a gradient of {grad.dtype} and a weight of {weight.dtype}"
            raise InvalidSettings(f"{self.name} cannot take {what}", "it takes floats")
        arrays = self._ready(state, weight, member)
        state["step"] += 1
        params, step = self._params, int(state["step"][0])
        rate = params["learning_rate"] if self._followed is None else self._followed.rate(step)
        lr, wd = rate * self._multipliers[0], params["wd"] * self._multipliers[1]
        return Call(step, lr, wd, params["clip_gradient"]), arrays

    @property
    def _lazy(self) -> bool:
        """Whether a gradient of rows changes only those rows, as in MXNet."""
        return bool(self._params.get("lazy_update", False))

    def given(
        self, state: Arrays, member: int, weight: Array, rows: tuple[int, Array] | None = None,
        decoded: Array | None = None,
    ) -> None:  # fmt: skip
        """Record that this member received the slice's present weight. It is newer than the weight after the member's
        own last update, or the member pulled before its first update.

        rows: the elements in a row and the received rows' numbers, if these are not all.
        decoded: the values that it received in place of the weight, if a codec has changed them.
        """
        if not state or not self.seen:  # before the slice's first update there is only one weight
            return
        now = _exact(state, weight)
        got = now if decoded is None else decoded
        for what in self.by_member:
            name = f"{what}.{member}"
            if name not in state:
                state[name] = self._fresh(what, now, state)
            if what in self.seen and rows is None:
                np.copyto(state[name], got)
            elif what in self.seen and rows is not None:
                Rows.of(now, *rows).write_to(state[name])

    def _run(
        self,
        step: Callable[..., None],
        call: Call,
        master: Array | None,
        arrays: list[Array],
        weight: Array,
        grad: Array,
        result: Array,
    ) -> None:
        source, out, scale = grad.reshape(-1), result.reshape(-1), self._params["rescale_grad"]
        old = weight.reshape(-1) if master is None else master
        new = out if master is None else master
        if old.dtype not in self._scratch:
            self._scratch[old.dtype] = (np.empty(_BLOCK, old.dtype), np.empty(_BLOCK, old.dtype))
        scratch = self._scratch[old.dtype]
        with np.errstate(all="ignore"):
            for start in range(0, out.size, _BLOCK):
                part = slice(start, min(start + _BLOCK, out.size))
                g, temp = (buffer[: part.stop - start] for buffer in scratch)
                np.multiply(source[part], scale, out=g, dtype=g.dtype, casting="same_kind")
                step(call, old[part], g, temp, new[part], *(array[part] for array in arrays))
                if master is not None:
                    np.copyto(out[part], new[part], casting="same_kind")

    @abstractmethod
    def _step(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        """Write a block of the new weight to `new`, which may be `old` itself; `g` and `temp` are scratch."""

    def _step_of_rows(self, call: Call, old: Array, g: Array, temp: Array, new: Array, *arrays: Array) -> None:
        """Like `_step` for a row-sparse gradient, lazy or not: MXNet's operators round differently there."""
        self._step(call, old, g, temp, new, *arrays)

    def _wanted(self) -> tuple[str, ...]:
        """The slice's arrays that the present hyper-parameters need, in `_step`'s order, before the member's own.
        """
        return self.required

    def _fresh(self, what: str, weight: Array, arrays: Mapping[str, Array]) -> Array:
        """The initial array, in the dtype of `weight`, which is flat; `arrays` are the slice's arrays so far."""
        return np.zeros_like(weight)

    def _ready(self, state: Arrays, weight: Array, member: int) -> list[Array]:
        """The arrays that this update needs. Starts the whole state, or checks that it belongs to such a weight."""
        work = WORK[weight.dtype]
        if not state:
            state["step"] = np.zeros(1, np.int64)
            if weight.dtype != work:
                state["master"] = weight.astype(work).reshape(-1)
        fits = ("master" in state) == (weight.dtype != work) and all(
            name == "step" or (array.size == weight.size and array.dtype == work) for name, array in state.items()
        )
        if not fits:
            raise InvalidSettings(f"the {self.name} state does not fit a weight of {weight.dtype}{weight.shape}")
        wanted = self._wanted()
        for name in [name for name in state if "." not in name and name not in ("step", "master", *wanted)]:
            del state[name]
        now = _exact(state, weight)
        names = (*wanted, *(f"{what}.{member}" for what in self.by_member))
        for name in names:
            if name not in state:
                state[name] = self._fresh(name.partition(".")[0], now, state)
        return [state[name] for name in names]

    def states_in(self, named: Mapping[str, Array]) -> dict[tuple[int, int], Arrays]:
        """Copies of the states in these arrays, which are named "key/slice/what", by key and slice.

        Raises InvalidSettings if they are not whole states of such an optimizer.
        """
        slices: dict[tuple[int, int], Arrays] = {}
        for name, array in named.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise InvalidSettings(f"{name!r} does not name optimizer state", 'as in "3/0/step"')
            slices.setdefault((int(match[1]), int(match[2])), {})[match[3]] = array.copy()
        for where, state in slices.items():
            self._check(where, state)
        return slices

    def _check(self, where: tuple[int, int], state: Arrays) -> None:
        """Raise InvalidSettings unless these arrays are the whole state of such an optimizer."""
        arrays = {name: array for name, array in state.items() if name != "step"}
        step = state.get("step")
        good = step is not None and step.shape == (1,) and step.dtype.kind == "i" and step[0] >= 0
        own = {name for name in arrays if "." in name}
        members = {name.partition(".")[2] for name in own}
        whole = {*self.required} <= arrays.keys() - own <= {"master", *self.required, *self.occasional}
        whole = whole and own == {f"{what}.{member}" for what in self.by_member for member in members}
        alike = len({(array.dtype, array.shape) for array in arrays.values()}) <= 1
        alike = alike and all(array.ndim == 1 and array.dtype in WORK.values() for array in arrays.values())
        if not (good and whole and alike):
            found, need = ", ".join(sorted(state)), ", ".join(("step", *self.required))
            message = f"slot {where[0]}/{where[1]} has no state of {self.name} in ({found})"
            raise InvalidSettings(message, f"it needs {need}, of one size and dtype")


def _exact(state: Arrays, weight: Array) -> Array:
    """The weight in the working dtype, flat."""
    return state.get("master", weight.reshape(-1))


@dataclass(slots=True)
class LocalOptimizer:
    """A worker's optimizer that updates one vector, with the vector's arrays. It gives the same bits as servers."""

    optimizer: Optimizer
    state: Arrays = field(default_factory=dict)

    def update(self, vector: Array, gradient: Array) -> Array:
        """See Optimizer.update."""
        return self.optimizer.update(self.state, vector, gradient)
