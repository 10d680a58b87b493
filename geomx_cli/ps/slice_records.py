"""A slice as a record of the state file: plain fields, and the arrays that they name.

A record has what the slice's server cannot get again from other processes: the value, the arrays of optimizer,
algorithm, codecs and delivery, the closed rounds, and the result that members may request again. It lacks open rounds,
because their members send their contributions again.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np

from geomx_cli.core.typed import to_type
from geomx_cli.ps.aggregation.codec import Codec, codec_at, parse_codec
from geomx_cli.ps.aggregation.rounds import SERIAL, Accumulator, Cohort, Result, RoundState, View
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.arrays import Array, Arrays
from geomx_cli.ps.net.payload import Rows, cast
from geomx_cli.ps.net.wire import Form, Header
from geomx_cli.ps.state_file import Saved

__all__ = ["read", "record_of", "serial_of"]


class _Rows(msgspec.Struct, array_like=True):
    """Some rows of a slice: the names of two arrays, one with their numbers and one with their values."""

    numbers: str
    values: str


class _View(msgspec.Struct, array_like=True):
    """See View.

    array: name of the decoded array; "" if it is decoded from the payload when it is needed.
    payload: name of the encoded payload, "" for none.
    form: see wire.Form, of the payload.
    """

    codec: str
    array: str
    payload: str
    form: int


class _Result(msgspec.Struct, array_like=True):
    """See Result."""

    version: int
    contributors: list[int]
    weight: float
    is_sum: bool
    changed: _Rows | None
    views: list[_View]
    missed_to: int


class _Cohort(msgspec.Struct, array_like=True):
    """See Cohort. ranks, weight: of the closed round, if its answer is deferred."""

    member: int
    closed: int
    finished: int
    deferred: bool
    version: int
    is_sum: bool
    ranks: list[int]
    weight: float
    changed: _Rows | None
    result: _Result | None


class _Slice(msgspec.Struct, array_like=True):
    """See SliceState and SliceTable.

    value: name of the array, "" for none.
    parts: names of arrays by part and name.
    optimizers: how many optimizers had replaced all earlier ones (OptimizerHistory.uses).
    """

    key: int
    index: int
    root: int
    length: int
    dtype: int
    offset: int
    row: int
    size: int
    shard: int
    version: int
    forwarded: int
    missed_to: int
    has_missed: bool
    hyper: dict[str, float]
    initial_from: str
    initial_digest: bytes
    asynchronous: bool
    optimizers: int
    value: str
    parts: dict[str, dict[str, str]]
    cohorts: list[_Cohort]


class _Names:
    """Gives arrays names in a record. An array that several fields of the slice share is saved once."""

    def __init__(self) -> None:
        self.arrays: Arrays = {}
        self._known: dict[int, str] = {}

    def of(self, array: Array | None) -> str:
        """The array's name, "" for none."""
        if array is None:
            return ""
        name = self._known.setdefault(id(array), str(len(self._known)))
        self.arrays[name] = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        return name

    def of_rows(self, rows: Rows | None) -> _Rows | None:
        """Names of the arrays of these rows."""
        return None if rows is None else _Rows(self.of(rows.numbers), self.of(rows.values))


def record_of(entry: SliceState, *, asynchronous: bool, optimizers: int) -> tuple[Any, Arrays]:
    """The fields and arrays of a slice's record, for StateFile.commit."""
    names = _Names()
    saved = _Slice(
        entry.key, entry.index, entry.root, entry.length, entry.dtype, entry.offset, entry.row, entry.size,
        entry.shard, entry.version, entry.forwarded, entry.missed_to, entry.has_missed, entry.hyper, entry.initial_from,
        entry.initial_digest, asynchronous, optimizers, names.of(entry.value),
        {part: {name: names.of(array) for name, array in arrays.items()} for part, arrays in entry.parts.items()},
        [_cohort(cohort, names) for cohort in entry.cohorts.values() if cohort.closed],
    )  # fmt: skip
    return saved, names.arrays


def _cohort(cohort: Cohort, names: _Names) -> _Cohort:
    result = cohort.result
    kept = None
    if result is not None:
        views = [_view(view, names) for view in result.views]
        kept = _Result(
            result.version, list(result.contributors), result.weight, result.is_sum, names.of_rows(result.changed),
            views, result.missed_to,
        )  # fmt: skip
    sum_ = cohort.round.accumulator if cohort.deferred and cohort.round is not None else Accumulator()
    return _Cohort(
        cohort.member, cohort.closed, cohort.finished, cohort.deferred, cohort.version, cohort.is_sum,
        sorted(sum_.ranks), sum_.weight, names.of_rows(cohort.changed), kept,
    )  # fmt: skip


def _view(view: View, names: _Names) -> _View:
    payload, form = "", 0
    if view.encoded is not None:
        raw, about = view.encoded
        payload, form = names.of(np.frombuffer(raw, np.uint8)), int(about["form"])
    return _View(view.codec, names.of(view.made), payload, form)


def serial_of(saved: Saved) -> int:
    """The serial number of the optimizer that a slice has in its record."""
    return int(to_type(saved.fields, _Slice).hyper.get(SERIAL, 0))


def read(saved: Saved, table: SliceTable, optimizers: int) -> None:
    """Put a slice into the table as its record says.

    optimizers: see _Slice; the number in this process. The state of an optimizer that was replaced since is dropped.
    Raises msgspec.ValidationError and KeyError for a record of another version.
    """
    known: _Slice = to_type(saved.fields, _Slice)
    header = Header(
        key=known.key, slice=known.index, root=known.root, length=known.length, dtype=known.dtype, offset=known.offset,
        row=known.row, size=known.size, shard=known.shard,
    )  # fmt: skip
    entry = table.add(header)
    arrays = saved.arrays
    entry.version, entry.forwarded = known.version, known.forwarded
    entry.missed_to, entry.has_missed = known.missed_to, known.has_missed
    entry.initial_from, entry.initial_digest = known.initial_from, known.initial_digest
    entry.value = arrays[known.value] if known.value else None
    entry.parts = {part: {name: arrays[at] for name, at in names.items()} for part, names in known.parts.items()}
    entry.hyper = known.hyper
    if known.optimizers != optimizers:
        entry.hyper, entry.parts["optimizer"] = {}, {}
    table.asynchronous = table.asynchronous or known.asynchronous
    for each in known.cohorts:
        cohort = entry.cohort(each.member)
        cohort.closed, cohort.finished, cohort.deferred = each.closed, each.finished, each.deferred
        cohort.version, cohort.is_sum = each.version, each.is_sum
        cohort.changed = _rows(each.changed, arrays)
        if each.deferred:
            cohort.round = RoundState(Accumulator(ranks=set(each.ranks), weight=each.weight))
        if each.result is not None:
            cohort.result = _result(each.result, entry, each.finished, arrays)
        table.note_finished(entry, cohort, contributed=cohort.result is not None and cohort.result.weight > 0)


def _rows(saved: _Rows | None, arrays: Mapping[str, Array]) -> Rows | None:
    return None if saved is None else Rows(arrays[saved.numbers], arrays[saved.values])


def _result(saved: _Result, entry: SliceState, round_: int, arrays: Mapping[str, Array]) -> Result:
    views = tuple(_restored_view(view, entry, round_, arrays) for view in saved.views)
    changed = _rows(saved.changed, arrays)
    return Result(views, saved.version, tuple(saved.contributors), saved.weight, changed, saved.is_sum, saved.missed_to)


def _restored_view(saved: _View, entry: SliceState, round_: int, arrays: Mapping[str, Array]) -> View:
    array: Array | Callable[[], Array]
    encoded = None
    if saved.payload:
        payload = arrays[saved.payload].data
        encoded = payload, {"form": Form(saved.form)}
    if saved.array:
        array = arrays[saved.array]
    else:
        codec = codec_at(parse_codec(saved.codec), entry.size, round_)
        assert codec is not None and encoded is not None
        array = partial(_decoded, codec, encoded[0], entry)
    return View(array, encoded, saved.codec)


def _decoded(codec: Codec, payload: memoryview, entry: SliceState) -> Array:
    return cast(codec.decode(payload, entry.length), entry.dtype)
