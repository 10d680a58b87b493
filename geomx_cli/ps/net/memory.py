"""The memory of payloads: memory shared between processes of one host, and settings of malloc.

If a large payload goes to a process of the same host, messages carry only its place in shared memory.
Each process has one arena that only it writes to: an unnamed file of fixed size (sealed memfd). It offers the arena to
each peer connected by a unix socket, and sends places to peers that have mapped it. A block is reused when all
receivers of its place have freed it. They free it when nothing refers to the payload any more. If sharing is impossible
(another account or namespace, no room left), payloads are sent through the socket.

numpy is imported with the first payload, so that schedulers, which receive none, start faster.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from geomx_cli.ps.net.wire import BadMessage

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array

__all__ = ["PLACE", "Arena", "LinkMemory", "PeerArena", "keep_freed_memory", "share_one_heap"]

SIZE = 2**30  # of address space; pages are allocated when blocks are used
TOKEN = 16
STEP = 2**16  # the smallest block
FIRST = STEP  # the first step holds the token
PLACE = struct.Struct("<QQ")
"""Offset and size of a payload in its sender's arena."""
MOST_FREED = 65_536

F_ADD_SEALS, F_GET_SEALS, SEALS = 1033, 1034, 0x0001 | 0x0002 | 0x0004  # of fcntl.h: no more seals, shrinking, growing


@dataclass(slots=True, eq=False)
class _Block:
    """source: the id of the copied array, if the array never changes. Then other peers can use the same block."""

    size: int
    source: int | None
    holders: dict[object, int] = field(default_factory=dict)


class Arena:
    """This process's memory for payloads. Used by the loop's thread only. Raises OSError if unsupported.

    peer: identifies a receiver of places; any object.
    on_full: called once, when there is no room for the first time.
    """

    def __init__(self, on_full: Callable[[], None] = lambda: None) -> None:
        create = getattr(os, "memfd_create", None)
        if create is None:
            raise OSError(errno.ENOSYS, "this system has no files in memory")
        self._file: int = create("geomx", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, SIZE)
            fcntl.fcntl(self._file, F_ADD_SEALS, SEALS)
            self._memory = mmap.mmap(self._file, SIZE)
        except BaseException:
            os.close(self._file)
            raise
        self._on_full = on_full
        self._was_full = False
        self._token = secrets.token_bytes(TOKEN)
        self._memory[:TOKEN] = self._token
        self._next = FIRST
        self._free: dict[int, list[int]] = {}
        self._blocks: dict[int, _Block] = {}
        # id of a source -> its block; the weak reference detects a reused id
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def offer(self) -> dict[str, Any]:
        """The data that a peer needs to map the arena."""
        return {"pid": os.getpid(), "file": self._file, "token": self._token}

    def put(self, peer: object, payload: memoryview, *, lasting: bool) -> bytes | None:
        """Copy the payload into a block and lend it to the peer. Returns the block's PLACE, or None if there is no
        room.

        lasting: the array behind the payload never changes, so it is copied only once for all receivers.
        """
        import numpy as np

        source = payload.obj if lasting and isinstance(payload.obj, np.ndarray) else None
        offset, known = self._known.get(id(source), (None, None))
        if offset is None or known is None or known() is not source:
            offset = self._allocate(len(payload), source)
            if offset is None:
                if not self._was_full:
                    self._was_full = True
                    self._on_full()
                return None
            np.copyto(self._bytes[offset : offset + len(payload)], np.frombuffer(payload, np.uint8))
        holders = self._blocks[offset].holders
        holders[peer] = holders.get(peer, 0) + 1
        return PLACE.pack(offset, len(payload))

    def freed(self, peer: object, offsets: Any) -> None:
        """The peer has freed these blocks. Raises BadMessage for a block that was not lent to it."""
        if not isinstance(offsets, list):
            raise BadMessage("freed blocks that are no list")
        for offset in offsets:
            block = self._blocks.get(offset) if isinstance(offset, int) else None
            if block is None or peer not in block.holders:
                raise BadMessage("a block freed by one who does not have it")
            block.holders[peer] -= 1
            if not block.holders[peer]:
                del block.holders[peer]
            if not block.holders:
                self._release(offset, block)

    def forget(self, peer: object) -> None:
        """Release everything lent to a lost peer."""
        for offset, block in list(self._blocks.items()):
            if block.holders.pop(peer, 0) and not block.holders:
                self._release(offset, block)

    @cached_property
    def _bytes(self) -> "Array":
        import numpy as np

        return np.frombuffer(self._memory, np.uint8)

    @property
    def used(self) -> int:
        """Bytes of all lent blocks."""
        return sum(block.size for block in self._blocks.values())

    def _allocate(self, size: int, source: "Array | None") -> int | None:
        # powers of two make free blocks fit; untouched pages cost no memory
        size = max(STEP, 1 << (size - 1).bit_length())
        free = self._free.get(size)
        if free:
            offset = free.pop()
        elif self._next + size <= SIZE:
            offset, self._next = self._next, self._next + size
        else:
            return None
        self._blocks[offset] = _Block(size, None if source is None else id(source))
        if source is not None:
            self._known[id(source)] = offset, weakref.ref(source)
        return offset

    def _release(self, offset: int, block: _Block) -> None:
        del self._blocks[offset]
        if block.source is not None and self._known.get(block.source, (None,))[0] == offset:
            del self._known[block.source]
        self._free.setdefault(block.size, []).append(offset)


class PeerArena:
    """A peer's arena, mapped read-only. Raises OSError or BadMessage for an unusable offer.

    offer: see Arena.offer.
    on_free: called, in any thread, when `freed` has blocks again.
    """

    def __init__(self, offer: dict[str, Any], on_free: Callable[[], None]) -> None:
        pid, number, token = offer.get("pid"), offer.get("file"), offer.get("token")
        if not (isinstance(pid, int) and isinstance(number, int) and pid > 0 and number >= 0):
            raise BadMessage("an offer of memory that names no file")
        file = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            facts = os.fstat(file)
            seals = fcntl.fcntl(file, F_GET_SEALS)  # fails unless it is a memfd
            if facts.st_uid != os.geteuid() or facts.st_size != SIZE or seals & SEALS != SEALS:
                raise BadMessage("an offer of memory that is no sealed arena of this account")
            self._memory = mmap.mmap(file, SIZE, mmap.MAP_SHARED, mmap.PROT_READ)
        finally:
            os.close(file)
        # In another namespace of processes, the same pid and descriptor could belong to another process's arena.
        if self._memory[:TOKEN] != token:
            raise BadMessage("an offer of memory with another token: from another namespace of processes?")
        self._freed: deque[int] = deque()
        self._on_free = on_free
        self._process = os.getpid()

    def view(self, place: memoryview | bytes) -> memoryview:
        """The payload at a PLACE, read-only; its block appears in `freed` once nothing refers to it. Raises BadMessage.
        """
        if len(place) != PLACE.size:
            raise BadMessage(f"a place of {len(place)} bytes")
        offset, size = PLACE.unpack(place)
        if not (size > 0 and offset >= FIRST and offset + size <= SIZE):
            raise BadMessage(f"a payload of {size} bytes at {offset} of an arena")
        import numpy as np

        payload: Array = np.asarray(_Lent(self, self._address + offset, size, offset))
        return payload.data

    @cached_property
    def _address(self) -> int:
        import numpy as np

        return np.frombuffer(self._memory, np.uint8).ctypes.data

    def drop(self, offset: int) -> None:
        """A payload has no references left. Any thread. Ignored in a forked child, which does not own the loan."""
        if os.getpid() != self._process:
            return
        was_empty = not self._freed
        self._freed.append(offset)
        if was_empty or len(self._freed) == 1:
            self._on_free()

    def freed(self) -> list[int]:
        """The blocks freed since the last call."""
        found: list[int] = []
        with contextlib.suppress(IndexError):
            while len(found) < MOST_FREED:
                found.append(self._freed.popleft())
        return found


class _Lent:
    """Base object of all views of one payload. numpy keeps it alive until the last view is gone. Then the block is
    freed.
    """

    def __init__(self, arena: PeerArena, address: int, size: int, offset: int) -> None:
        self._arena, self._offset = arena, offset
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        self._arena.drop(self._offset)


class LinkMemory:
    """The memory that the two ends of a link over a unix socket lend each other. Used by the loop's thread only.

    The dialling end offers its arena. A peer that can map it is on the same host, and offers its own.

    arena: returns this process's arena, and makes it at the first call; None if the system has none.
    control: sends a CONTROL message to the peer.
    on_free: called, in any thread, when `freed` has blocks to return.
    """

    def __init__(
        self,
        arena: Callable[[], Arena | None],
        control: Callable[[str, dict[str, Any] | None], None],
        on_free: Callable[[], None],
    ) -> None:
        self._arena = arena
        self._control = control
        self._on_free = on_free
        self._mine: Arena | None = None  # None before it is offered
        self._theirs: PeerArena | None = None
        self._lends = self._ended = False

    def offer(self) -> None:
        """Offer this process's memory, once."""
        if self._mine is None and (arena := self._arena()) is not None:
            self._mine = arena
            self._control("memory", arena.offer())

    def on_memory(self, offer: dict[str, Any]) -> None:
        """The peer offers its memory. Map it if possible, and offer this process's memory. Raises BadMessage."""
        if self._theirs is not None:
            return
        try:
            self._theirs = PeerArena(offer, self._on_free)
        except OSError:
            return
        self._control("mapped", None)
        self.offer()

    def on_mapped(self) -> bool:
        """The peer reports that it has mapped this process's arena. Return whether the arena was offered to it. If so,
        the peer gets blocks from now on.
        """
        self._lends = self._mine is not None
        return self._lends

    def on_freed(self, body: dict[str, Any]) -> None:
        """The peer has freed blocks. Raises BadMessage for a block that was not lent to it."""
        if self._mine is not None and not self._ended:
            self._mine.freed(self, body.get("blocks"))

    def lend(self, payload: memoryview, *, lasting: bool) -> bytes | None:
        """The place of a copy of the payload; None if there is no room, or the peer maps nothing. See Arena.put."""
        if self._mine is None or not self._lends or self._ended:
            return None
        return self._mine.put(self, payload, lasting=lasting)

    def view(self, place: memoryview) -> memoryview:
        """The payload at a place in the peer's arena. Raises BadMessage."""
        if self._theirs is None:
            raise BadMessage("a payload in memory that is not shared")
        return self._theirs.view(place)

    def freed(self) -> list[int]:
        """The peer's blocks that nothing refers to any more, to be returned."""
        return self._theirs.freed() if self._theirs is not None else []

    def release(self) -> None:
        """The peer has left or is lost: release all blocks that were lent to it.

        The peer may still return blocks that other peers have by then. Such a return has no effect. The peer gets no
        further blocks.
        """
        self._ended = True
        if self._mine is not None:
            self._mine.forget(self)


# glibc's malloc; no effect with other C libraries (musl, macOS).

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def keep_freed_memory() -> None:
    """Let malloc reuse the memory of slices instead of mapping, faulting in and unmapping each one."""
    _set(M_MMAP_THRESHOLD, 32 * 2**20)
    _set(M_TRIM_THRESHOLD, 512 * 2**20)


def share_one_heap() -> None:
    """Make all threads share one heap. Call it before starting threads. Otherwise the loop cannot reuse, for its sums,
    memory that libzmq's thread has freed. Then a server needs up to a third more memory.
    """
    _set(M_ARENA_MAX, 1)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
