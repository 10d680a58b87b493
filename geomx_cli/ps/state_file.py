"""Records of named arrays and a journal of requests, in files that outlive the process.

A file of records has a region for each record, with room for two generations:

    header: magic, room              written once, before anything is saved in the region
    generation 0: ... arrays, index, trailer
    generation 1: ... arrays, index, trailer

A commit writes the arrays, the index and the trailer of the older generation by one system call. The trailer lies at
the generation's end and is written last. If the writer is killed before, that generation has an older or no valid
trailer, and the other generation is the newest. This needs neither fsync nor a checksum of the arrays, because a kill
loses no bytes that the kernel has. The file does not survive a loss of power.

A record that outgrows its region gets a new one, and the old region becomes free for others. The index has the record's
id, so another record can use a region without a write to its header. A torn header would hide all later regions.
"""

import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from geomx_cli.ps.arrays import Array

__all__ = ["Journal", "Saved", "StateFile"]

_HEADER = struct.Struct("<8sQI")  # magic, room of a generation and its checksum
_TRAILER = struct.Struct("<8sQQQI")  # magic, sequence number, bytes of arrays, bytes of the index, checksum
_ENTRY = struct.Struct("<II")  # of the journal: length, checksum
_MAGIC = b"geomxst1"
_ALIGN = 4096
_HEADROOM = 1.25
"""Room for a record that has outgrown its region, relative to its size: encoded payloads differ from round to round."""
_MOST_PARTS = 1000  # of one pwritev; the kernel takes 1024

_decoder = msgspec.msgpack.Decoder(tuple[str, Any, list[tuple[str, str, tuple[int, ...]]]])

_Result = TypeVar("_Result")


class Saved(NamedTuple):
    """A record as of its last commit.

    fields: what msgpack can hold.
    arrays: by name, with dtype and shape, in memory of their own.
    """

    fields: Any
    arrays: dict[str, Array]


@dataclass
class _Region:
    """offset: of its header in the file.
    room: bytes of a generation, its trailer included.
    newest: the generation committed last, or 1 before the first.
    """

    offset: int
    room: int
    newest: int = 1

    @property
    def size(self) -> int:
        return _ALIGN + 2 * self.room

    def end(self, generation: int) -> int:
        """The offset behind a generation's trailer."""
        return self.offset + _ALIGN + (generation + 1) * self.room


@dataclass
class _Found:
    """The newest generation that loading has found of a record."""

    sequence: int
    region: _Region
    generation: int
    arrays: int
    index: int


class StateFile:
    """Records by id, each replaced as a whole or not at all by `commit`. For one thread.

    Opening it, `load` and `step_back` raise ValueError for an index that no `commit` has written.

    path: created with mode 0600 if it is not there. A file on tmpfs survives its processes, not the machine.
    keeps_two: each record's last commit but one stays in the file too, until the next commit; see `step_back`.
    Memory: twice the arrays, allocated when a record is first committed; more for a record whose size varies.
    """

    def __init__(self, path: Path, *, keeps_two: bool = False) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._keeps_two = keeps_two
        self._regions: dict[str, _Region] = {}
        self._free: list[_Region] = []
        self._outgrown: dict[str, _Region] = {}  # replaced by a larger region since the last commit but one
        self._older: dict[str, _Found] = {}
        self._end = 0
        self._sequence = 0
        self._newest = self._scan()

    def commit(self, name: str, fields: Any, arrays: Mapping[str, Array]) -> None:
        """Replace a record.

        name: its id.
        fields: what msgpack can hold.
        arrays: contiguous, of any dtype of numpy without objects; not kept after the return.
        Raises OSError if there is no room; then the file has the record as of its last commit.
        """
        index = msgspec.msgpack.encode((name, fields, [(n, a.dtype.str, a.shape) for n, a in arrays.items()]))
        size = sum(array.nbytes for array in arrays.values())
        region = self._region(self._regions.get(name), size + len(index) + _TRAILER.size)
        generation = 1 - region.newest
        self._sequence += 1
        trailer = _trailer(self._sequence, size, index)
        parts = [array.reshape(-1).view(np.uint8).data for array in arrays.values() if array.nbytes]
        start = region.end(generation) - _TRAILER.size - len(index) - size
        self._write([*parts, memoryview(index), memoryview(trailer)], start)
        region.newest = generation
        if (last := self._outgrown.pop(name, None)) is not None:
            self._free.append(last)
        # An outgrown region is free only now: until here it had the record.
        if (old := self._regions.get(name)) is not None and old is not region:
            if self._keeps_two:
                self._outgrown[name] = old
            else:
                self._free.append(old)
        self._regions[name] = region

    def load(self) -> Iterator[tuple[str, Saved]]:
        """The newest generation of each record that the file had when it was opened, one at a time."""
        for name, found in self._newest.items():
            yield name, self._record(found)

    def step_back(self, name: str) -> Saved | None:
        """Drop the newest generation of a record, and return the one before; None if there is none, and then the record
        is gone. For a file that `keeps_two`, before the first commit to the record.
        """
        newest, older = self._newest.pop(name), self._older.pop(name, None)
        _write_all(self._file, bytes(_TRAILER.size), newest.region.end(newest.generation) - _TRAILER.size)
        region, outgrown = self._regions.pop(name), self._outgrown.pop(name, None)
        if outgrown is not None or older is None:
            self._free.append(region)
        if older is None:
            return None
        older.region.newest = older.generation
        self._regions[name], self._newest[name] = older.region, older
        return self._record(older)

    def _record(self, found: _Found) -> Saved:
        start = found.region.end(found.generation) - _TRAILER.size - found.index - found.arrays
        _, fields, described = _decoded(_decoder.decode, _read(self._file, found.index, start + found.arrays))
        kinds = [_kind(dtype) for _, dtype, _ in described]
        sizes = [kind.itemsize * _count(shape) for kind, (_, _, shape) in zip(kinds, described, strict=True)]
        if sum(sizes) != found.arrays:  # before memory is taken for them
            raise ValueError(f"the index tells of {sum(sizes)} bytes of arrays instead of {found.arrays}")
        arrays = {}
        for (what, _, shape), kind in zip(described, kinds, strict=True):
            array = arrays[what] = np.empty(shape, kind)
            if array.nbytes:
                _fill(self._file, array.reshape(-1).view(np.uint8).data, start)
            start += array.nbytes
        return Saved(fields, arrays)

    def close(self) -> None:
        os.close(self._file)

    # Regions.

    def _region(self, known: _Region | None, size: int) -> _Region:
        """Return a region with room for `size` bytes: the record's own if that has it."""
        if known is not None and known.room >= size:
            return known
        room = -(-int(size * (_HEADROOM if known else 1)) // _ALIGN) * _ALIGN
        fits = [free for free in self._free if room <= free.room <= 2 * room]
        if fits:
            region = min(fits, key=lambda free: free.room)
            self._free.remove(region)
            region.newest = 1
        else:
            region = _Region(self._end, room)
            # All blocks are taken now: a later commit into this region cannot run out of space.
            os.posix_fallocate(self._file, region.offset, region.size)
            _write_all(self._file, _header(room), region.offset)
            self._end += region.size
        return region

    def _write(self, parts: list[memoryview], start: int) -> None:
        """Write the parts in their order, as a rule by one call. The last part is written last in any case."""
        while parts:
            written = os.pwritev(self._file, parts[:_MOST_PARTS], start)
            start += written
            while parts and written >= len(parts[0]):
                written -= len(parts.pop(0))
            if written:
                parts[0] = parts[0][written:]

    def _scan(self) -> dict[str, _Found]:
        """Find all regions and the newest generation of each record, and the one before."""
        size = os.fstat(self._file).st_size
        generations: dict[str, list[_Found]] = {}
        free: list[_Region] = []
        while self._end + _ALIGN <= size and (room := _room(_read(self._file, _HEADER.size, self._end))):
            region = _Region(self._end, room)
            if region.offset + region.size > size:
                break
            free.append(region)
            self._end += region.size
            for name, found in self._generations(region):
                self._sequence = max(self._sequence, found.sequence)
                generations.setdefault(name, []).append(found)
        newest: dict[str, _Found] = {}
        for name, all_found in generations.items():
            all_found.sort(key=lambda each: each.sequence)
            newest[name] = all_found[-1]
            if len(all_found) > 1:
                self._older[name] = all_found[-2]
        for name, found in newest.items():
            found.region.newest = found.generation
            self._regions[name] = found.region
            free.remove(found.region)
        for name, found in self._older.items() if self._keeps_two else ():
            if found.region in free:
                free.remove(found.region)
                self._outgrown[name] = found.region
        self._free = free
        os.ftruncate(self._file, self._end)  # what a killed writer had begun to allocate
        return newest

    def _generations(self, region: _Region) -> Iterator[tuple[str, _Found]]:
        for generation in (0, 1):
            end = region.end(generation)
            magic, sequence, arrays, index, check = _TRAILER.unpack(
                _read(self._file, _TRAILER.size, end - _TRAILER.size)
            )
            if magic != _MAGIC or arrays + index + _TRAILER.size > region.room:
                continue
            raw = _read(self._file, index, end - _TRAILER.size - index)
            if check == _check(sequence, arrays, raw):
                yield _decoded(_decoder.decode, raw)[0], _Found(sequence, region, generation, arrays, index)


@dataclass
class Journal:
    """Entries that are appended, and dropped or replaced only together; for one thread.

    path: created with mode 0600 if it is not there. Opening it drops an entry whose writer was killed.
    replayed: the entries that were there.
    """

    path: Path
    replayed: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = os.fstat(self._file).st_size
        self.replayed, self._end = self._entries()
        os.ftruncate(self._file, self._end)

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return self._end

    def append(self, entry: Any) -> None:
        """Add what msgpack can hold. Raises OSError if there is no room; then nothing was added."""
        raw = _packed(entry)
        try:
            _write_all(self._file, raw, self._end)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(raw)

    def entries(self) -> list[Any]:
        """Read all entries."""
        return self._entries()[0]

    def replace(self, entries: Sequence[Any]) -> None:
        """Replace all entries, or none if the process is killed meanwhile. Raises OSError if there is no room; then
        nothing has changed.
        """
        part = self.path.with_name(f"{self.path.name}.part")
        file, end = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), 0
        try:
            for entry in entries:
                raw = _packed(entry)
                _write_all(file, raw, end)
                end += len(raw)
            part.replace(self.path)
        except OSError:
            os.close(file)
            part.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self._end = file, end

    def _entries(self) -> tuple[list[Any], int]:
        """The entries in the file, and where the last whole one ends."""
        raw, end = _read(self._file, self._end, 0), 0
        found: list[Any] = []
        while (entry := _entry(raw, end)) is not None:
            found.append(_decoded(msgspec.msgpack.decode, entry))
            end += _ENTRY.size + len(entry)
        return found, end

    def clear(self) -> None:
        """Drop all entries."""
        self._end = 0
        os.ftruncate(self._file, 0)

    def close(self) -> None:
        os.close(self._file)


def _packed(entry: Any) -> bytes:
    raw = msgspec.msgpack.encode(entry)
    return _ENTRY.pack(len(raw), zlib.crc32(raw)) + raw


def _entry(raw: bytes, start: int) -> bytes | None:
    if start + _ENTRY.size > len(raw):
        return None
    length, check = _ENTRY.unpack_from(raw, start)
    entry = raw[start + _ENTRY.size : start + _ENTRY.size + length]
    return entry if len(entry) == length and zlib.crc32(entry) == check and length else None


def _decoded(decode: Callable[[bytes], _Result], raw: bytes) -> _Result:
    """Decode, and raise only ValueError, as msgspec does except for what is nested too deeply."""
    try:
        return decode(raw)
    except RecursionError:
        raise ValueError("a record is nested too deeply") from None


def _kind(dtype: str) -> "np.dtype[Any]":
    """Return a dtype whose arrays may be read from a file. Raises ValueError."""
    try:
        kind = np.dtype(dtype)
    except Exception as error:  # numpy parses some of them as programs, with any error
        raise ValueError(f"the index tells of the dtype {dtype!r}: {error}") from None
    if kind.hasobject or not kind.itemsize:
        raise ValueError(f"the index tells of the dtype {dtype!r}")
    return kind


def _count(shape: Sequence[int]) -> int:
    """Return the number of elements of an array. Raises ValueError."""
    if not all(size >= 0 for size in shape):
        raise ValueError(f"the index tells of the shape {shape}")
    return math.prod(shape)


def _header(room: int) -> bytes:
    return _HEADER.pack(_MAGIC, room, zlib.crc32(room.to_bytes(8, "little")))


def _room(header: bytes) -> int | None:
    """Return the room of a generation that a region's header tells; None for no header."""
    if len(header) < _HEADER.size:
        return None
    magic, room, check = _HEADER.unpack(header)
    return room if magic == _MAGIC and check == zlib.crc32(room.to_bytes(8, "little")) else None


def _trailer(sequence: int, arrays: int, index: bytes) -> bytes:
    return _TRAILER.pack(_MAGIC, sequence, arrays, len(index), _check(sequence, arrays, index))


def _check(sequence: int, arrays: int, index: bytes) -> int:
    return zlib.crc32(index, zlib.crc32(struct.pack("<QQ", sequence, arrays)))


def _read(file: int, size: int, start: int) -> bytes:
    raw = bytearray(size)
    return bytes(raw[: _fill(file, raw, start)])


def _fill(file: int, into: bytearray | memoryview, start: int) -> int:
    """Fill the memory from a file; return how much of it the file had."""
    view, done = memoryview(into), 0
    while done < len(view) and (got := os.preadv(file, [view[done:]], start + done)):
        done += got
    return done


def _write_all(file: int, raw: bytes, start: int) -> None:
    done = 0
    while done < len(raw):
        done += os.pwrite(file, raw[done:], start + done)
