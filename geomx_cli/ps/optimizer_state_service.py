"""Reads and writes a root's optimizer state in pieces, so that no message is long."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.optim.optimizers import Optimizer
from geomx_cli.ps.optim.serialized_arrays import PIECE, SerializedArrays, deserialize

__all__ = ["OptimizerStateService"]


MAX_READERS = 4096
KINDS, KINDS_OF_MEMBER = 64, 2
"""Arrays of state of a slice, and further ones for each member: more than any optimizer has."""
REST = 10
"""A worker whose copy of the state took a second waits for ten until the next: others are answered meanwhile. Those of
a party share the connection of its server."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A copy of the state, with the number of updates and the last loaded state that it reflects."""

    packed: SerializedArrays
    optimizer: Optimizer
    updates: int
    loads: int


@dataclass(slots=True)
class _Upload:
    """A state being uploaded. `whole` extracts this root's part from the states of all roots. `touched`: when the last
    piece arrived, in time.monotonic seconds.
    """

    by: str
    whole: str
    digest: str
    size: int
    touched: float
    run: bytearray = field(default_factory=bytearray)
    hash: Any = field(default_factory=hashlib.sha256)  # of `run`, piece by piece: a whole state takes long


class OptimizerStateService:
    """Answers the topics of TOPICS at a root. Used by the loop's thread only. Requests name their senders truly: the
    first server that gets one checks that.

    A reader opens a snapshot, reads its pieces and closes it; readers between two updates share one. The snapshot names
    the last loaded state, so a reader detects that only some roots have loaded another one. One worker at a time may
    write; the others wait, as they usually bring the same state: one that was just loaded is not loaded again. A writer
    that has been silent for `silence` seconds is dropped. Nothing changes before the whole state has arrived and fits.

    members: how many contribute to this root.
    """

    TOPICS: ClassVar = ("state_open", "state_read", "state_close", "state_begin", "state_write")

    def __init__(self, aggregator: Aggregator, silence: float, members: Callable[[], int]) -> None:
        self._aggregator = aggregator
        self._table = aggregator.table
        self._silence = silence
        self._members = members
        self._rests: dict[Link, float] = {}  # until when (time.monotonic seconds)
        self._snapshots: dict[str, _Snapshot] = {}
        self._upload: _Upload | None = None
        self._taken: tuple[Optimizer, str, int] | None = None
        self._loads, self._loaded = 0, ""

    def rest(self, link: Link) -> float:
        """Seconds until this member may have the state copied again; 0 or less if it may now."""
        return self._rests.get(link, 0.0) - time.monotonic()

    def serve(self, topic: str, body: Body, link: Link) -> Body:
        """Answer a request of the member at `link`. Raises InvalidSettings, and KeyError and the like if malformed."""
        by = str(body["by"])
        match topic:
            case "state_open":
                began = time.monotonic()
                opened, now = self._open(by), time.monotonic()
                rest = REST * (now - began) / max(1, int(link.hello.get("workers", 1)))
                self._rests[link] = now + min(rest, self._silence / 2)  # who waits does not give up
                return opened
            case "state_read":
                return {"piece": self._opened(by).packed.piece(_natural(body["at"]))}
            case "state_close":
                self._snapshots.pop(by, None)
                return {}
            case "state_begin":
                return self._begin(_upload(by, body), str(body["optimizer"]))
        return self._write(by, _natural(body["at"]), memoryview(body["piece"]))

    def _optimizer(self) -> Optimizer:
        if self._aggregator.optimizer is None:
            raise InvalidSettings("there is no optimizer on the servers", "call set_optimizer first")
        return self._aggregator.optimizer

    def _open(self, by: str) -> Body:
        optimizer = self._optimizer()
        now = (optimizer, self._table.updates(), self._loads)
        shared = [item for item in self._snapshots.values() if (item.optimizer, item.updates, item.loads) == now]
        if len(self._snapshots) >= MAX_READERS and by not in self._snapshots:
            raise InvalidSettings(
                f"more than {MAX_READERS} workers read the optimizer's state at once", "let one worker save it"
            )
        snapshot = shared[0] if shared else _Snapshot(SerializedArrays(self._table.copy_of("optimizer")), *now)
        self._snapshots[by] = snapshot
        size = snapshot.packed.size
        return {"size": size, "optimizer": optimizer.name, "params": optimizer.params, "loaded": self._loaded}

    def _opened(self, by: str) -> _Snapshot:
        if by not in self._snapshots:
            raise InvalidSettings(f"{by} has not opened the optimizer's state")
        return self._snapshots[by]

    def _begin(self, new: _Upload, name: str) -> Body:
        optimizer = self._optimizer()
        if optimizer.name != name:
            raise InvalidSettings(
                f"the state is that of {name}, and the servers run {optimizer.name}", "set the optimizer that it is of"
            )
        most = 8 * self._most_arrays * sum(self._table.lengths().values()) + 2**20
        if new.size > most:
            raise InvalidSettings(f"state of {new.size} bytes is too much: these keys have {most} at the most")
        if self._taken == (optimizer, new.digest, self._table.updates()):
            self._loaded = new.whole
            return {"go": "known"}
        other = self._upload is not None and self._upload.by != new.by
        if other and self._upload is not None and new.touched - self._upload.touched < self._silence:
            return {"go": "wait"}
        self._upload = new
        return {"go": "on"}

    def _write(self, by: str, at: int, piece: memoryview) -> Body:
        upload = self._upload
        if upload is None or (upload.by, len(upload.run)) != (by, at) or not 0 < len(piece) <= PIECE:
            raise InvalidSettings(f"an unexpected piece of state at {at}")
        upload.run += piece
        upload.hash.update(piece)
        upload.touched = time.monotonic()
        if len(upload.run) >= upload.size:
            self._upload = None
            self._take(upload)
        return {}

    def _take(self, upload: _Upload) -> None:
        if upload.hash.hexdigest() != upload.digest:
            raise InvalidSettings("the state changed in transit")
        most = self._most_arrays * len(self._table.lengths())
        named, optimizer = deserialize(upload.run, most), self._optimizer()
        self._check(named)
        self._table.replace("optimizer", optimizer.states_in(named))
        self._loads, self._loaded = self._loads + 1, upload.whole
        self._taken = (optimizer, upload.digest, self._table.updates())

    @property
    def _most_arrays(self) -> int:
        """Of a slice."""
        return KINDS + KINDS_OF_MEMBER * self._members()

    def _check(self, named: Mapping[str, Array]) -> None:
        lengths = self._table.lengths()
        for name, array in named.items():
            key, index, what = (*name.split("/", 2), "", "")[:3]
            if not (key.isdecimal() and index.isdecimal()) or (int(key), int(index)) not in lengths:
                raise InvalidSettings(f"state {name!r} of a slice that this server does not have")
            if what != "step" and array.size != lengths[int(key), int(index)]:
                raise InvalidSettings(f"state {name!r} has {array.size} elements, its slice another number")


def _upload(by: str, body: Body) -> _Upload:
    return _Upload(by, str(body["whole"])[:64], str(body["digest"]), _natural(body["size"]), time.monotonic())


def _natural(value: Any) -> int:
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value
