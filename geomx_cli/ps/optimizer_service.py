"""Requests about a root's optimizer: to set it, from a round on, and to read and write its state."""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.aggregator import Aggregator
from geomx_cli.ps.aggregation.optimizer_history import Hyper, Successor
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.members import Member, ServerMembers
from geomx_cli.ps.optim import optimizers, schedules
from geomx_cli.ps.optim.optimizer import PIECE, SerializedArrays, deserialize
from geomx_cli.ps.optim.optimizers import Optimizer
from geomx_cli.ps.optim.schedules import Value

__all__ = ["OptimizerService", "OptimizerStateService"]

_MAX_SERIAL = 2**31
_MAX_KIND = 64
_MAX_AHEAD, _MAX_TUNED = 64, 2**17
"""Limits: optimizers that one process may set before any slice has them; tensors for which these have multipliers."""
MAX_READERS = 4096
KINDS, KINDS_OF_MEMBER = 64, 2
"""Limits on a slice's arrays of state, and on the further arrays for each member: more than any optimizer has."""
REST = 10
"""If a worker's copy of the state took a second, the worker waits ten seconds until the next copy. Other workers are
answered meanwhile. The workers of a party share the connection of its server."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """A request for an optimizer.

    by: the process that makes the request. It belongs to the root's member `rank`.
    name: "" if the optimizer runs on the workers. `kind` is then its class.
    tuned: number of tensors with multipliers.
    """

    by: str
    rank: int
    trains: bool
    name: str
    kind: str
    given: dict[str, Value | None]
    schedule: tuple[str, dict[str, Any]] | None
    tuned: int

    @classmethod
    def read(cls, body: Body, rank: int, *, trains: bool) -> "_Wish":
        """Parse a request. Raises KeyError and the like if it is malformed."""
        schedule = None
        if body.get("schedule") is not None:
            name, params = body["schedule"]
            schedule = (str(name), dict(params))
        kind, given = str(body.get("kind", ""))[:_MAX_KIND], dict(body["params"])
        tuned = len(body.get("multipliers", ()))
        return cls(str(body["by"]), rank, trains, str(body["name"]), kind, given, schedule, tuned)

    def make(self) -> Optimizer:
        """Create the optimizer. Raises InvalidSettings for invalid parameters."""
        schedule = None if self.schedule is None else schedules.create(*self.schedule)
        return optimizers.create(self.name, self.given, schedule)

    def is_from(self, other: "_Wish") -> bool:
        """Whether the same process requests both."""
        return (self.by, self.rank) == (other.by, other.rank)

    def like(self, other: "_Wish") -> bool:
        """Whether both request the same optimizer."""
        if not (self.name and other.name):
            return (self.name, self.kind) == (other.name, other.kind)
        same = (self.name, self.schedule) == (other.name, other.schedule)
        return same and self.make().params == other.make().params

    def unlike(self, other: "_Wish") -> str:
        """Describe it by the hyper-parameters in which it differs from `other`, if there are no other differences."""
        if not self.name or (self.name, self.schedule) != (other.name, other.schedule):
            return str(self)
        mine, theirs = self.make().params, other.make().params
        return f"{self.name} with " + ", ".join(f"{key} {mine[key]}" for key in mine if mine[key] != theirs[key])

    def __str__(self) -> str:
        if not self.name:
            return f"{self.kind}, which runs on the workers,"
        return f"{self.name} {self.given}" + (f" with the schedule {self.schedule[0]}" if self.schedule else "")


class OptimizerService:
    """Answers the topic "optimizer" at a root. Used by the loop's thread only. Requests name their true senders: the
    first server that gets a request checks that.

    A process that has not contributed yet sets the first optimizer, which takes effect at once. If it repeats the
    request, nothing changes. A different optimizer is accepted only from the process that set the first. There is one
    exception: until the first round, a training worker may replace the optimizer of a master that does not train.
    Scripts derive the optimizer's numbers from the number of workers, and this master is alone in its party.

    A process that has contributed registers the next optimizer under a serial number, which its contributions then
    name. A master that does not train sends two requests. The first holds all rounds and returns which rounds are
    closed. The second sets the optimizer from the next rounds on.
    """

    def __init__(self, aggregator: Aggregator, members: ServerMembers) -> None:
        self._aggregator = aggregator
        self._members = members
        self._wishes: dict[int, _Wish] = {}

    def apply(self, body: Body, sender: Member) -> Body:
        """Carry out a request, and return the answer. Raises InvalidSettings, and KeyError and the like for a malformed
        request.

        body: the request, and whether rounds have `begun`.
        """
        rank, trains = sender.rank, self._members.trains(sender.rank)
        if body.get("hold"):
            if trains:
                raise InvalidSettings("a worker that trains cannot hold the others' rounds")
            self._members.set_up_again(rank)
            return {"closed": list(self._aggregator.table.closed().items())}
        try:
            self._set(body, rank, trains)
        finally:
            self._members.set_up(rank)
        return {}

    def _set(self, body: Body, rank: int, trains: bool) -> None:
        wish, serial = _Wish.read(body, rank, trains=trains), int(body.get("serial", 0))
        if not 0 <= serial <= _MAX_SERIAL:
            raise InvalidSettings(f"an optimizer of serial number {serial}")
        if not wish.name:
            self._leave_to_workers(wish, serial)
            return
        if self._aggregator.history.on_workers:
            self._refuse_other(self._wishes[self._aggregator.history.since], wish)
        new, by_key = wish.make(), _by_key(body.get("multipliers", []))
        for hyper in by_key.values():
            new.tune(hyper)
        if serial == 0:
            if self._is_first(wish, begun=body["begun"]):
                self._aggregator.use(new, by_key)
            return
        self._refuse_other(self._wishes.get(serial), wish)
        if serial not in self._wishes:
            by_round = {int(key): int(round_) for key, round_ in body.get("by_round", [])}
            self._keep(serial, wish)
            self._aggregator.history.add(serial, Successor(new, by_key, None if trains else by_round, wish.by))

    def _keep(self, serial: int, wish: _Wish) -> None:
        """Record which process has set the optimizer, and drop optimizers that are no longer in use. Raises
        InvalidSettings for too many optimizers.
        """
        history = self._aggregator.history
        ahead = [one for known, one in self._wishes.items() if known > history.taken and one.by == wish.by]
        if len(ahead) >= _MAX_AHEAD or wish.tuned + sum(one.tuned for one in ahead) > _MAX_TUNED:
            what = f"{wish.by} has set {len(ahead)} optimizers, of which it has used none"
            raise InvalidSettings(what, "set an optimizer once, and then only before the rounds that it is for")
        used = (0, history.since)
        self._wishes = {n: one for n, one in self._wishes.items() if n in used or n > history.taken or history.knows(n)}
        self._wishes[serial] = wish

    def _is_first(self, wish: _Wish, *, begun: bool) -> bool:
        """Whether `wish` is the first optimizer or replaces it. Raises InvalidSettings for a conflict."""
        first = self._wishes.get(0)
        if first is not None and first.is_from(wish) and first.like(wish):
            return False
        if first is not None and not first.is_from(wish):
            gives_way = first.name == wish.name and not begun and wish.trains != first.trains
            if not (gives_way and wish.trains):
                if not gives_way:
                    self._refuse_other(first, wish)
                return False
        self._wishes[0] = wish
        return True

    def _leave_to_workers(self, wish: _Wish, serial: int) -> None:
        if self._aggregator.table.asynchronous:
            raise InvalidSettings(
                f"the optimizer {wish.kind} cannot run on the servers, and parties that train asynchronously need one"
                " there",
                f"use one of {', '.join(optimizers.SUPPORTED)}, or train synchronously",
            )
        if not wish.trains and self._aggregator.table.last_round:
            what = f"{wish.by} asks for the optimizer {wish} and training has begun"
            raise InvalidSettings(what, "have the workers set it, or the master before they push")
        if serial not in self._wishes:
            self._keep(serial, wish)
        self._refuse_other(self._wishes[serial], wish)
        workers = self._members.workers()
        self._aggregator.history.leave_to_workers(wish.kind, wish.by if wish.trains else "", workers, serial)

    def _refuse_other(self, former: _Wish | None, wish: _Wish) -> None:
        if former is not None and not former.like(wish):
            mine, other = wish.unlike(former), former.unlike(wish)
            what = f"{wish.by} asks for the optimizer {mine}, but {former.by} has set {other}"
            hint = "all workers that call set_optimizer must ask for the same one"
            if mine != str(wish) and self._members.counts_differ():
                hint = (
                    "kv.num_workers differs between parties, as it counts the workers of one: use kv.num_all_workers,"
                    f" or --rank-scope global; {hint}"
                )
            raise InvalidSettings(what, hint)


def _by_key(listed: Any) -> dict[int, Hyper]:
    return {int(key): {str(name): value for name, value in dict(hyper).items()} for key, hyper in listed}


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A copy of the state, with its number of updates, and with the last loaded state that it is based on."""

    packed: SerializedArrays
    optimizer: Optimizer
    updates: int
    loads: int


@dataclass(slots=True)
class _Upload:
    """A state while it is uploaded.

    whole: names the whole upload, of which each root gets one part.
    size: bytes.
    touched: when the last piece arrived, in time.monotonic seconds.
    """

    by: str
    whole: str
    digest: str
    size: int
    touched: float = field(default_factory=time.monotonic)
    run: bytearray = field(default_factory=bytearray)
    hash: Any = field(default_factory=hashlib.sha256)  # of `run`, piece by piece: a whole state takes long


class OptimizerStateService:
    """Answers the topics of TOPICS at a root. Used by the loop's thread only. Requests name their true senders: the
    first server that gets a request checks that.

    A reader opens a snapshot, reads its pieces and closes it. Readers between two updates share one snapshot. The
    snapshot names the last loaded state, so a reader detects that only some roots have loaded another state. One worker
    at a time may write, and the others wait. They usually bring the same state, and a state that was just loaded is not
    loaded again. A writer that has been silent for `silence` seconds is dropped. Nothing changes before the whole state
    has arrived and fits.

    members: how many members contribute to this root.
    """

    TOPICS: ClassVar = ("state_open", "state_read", "state_close", "state_begin", "state_write")

    def __init__(self, aggregator: Aggregator, silence: float, members: Callable[[], int]) -> None:
        self._aggregator = aggregator
        self._table = aggregator.table
        self._silence = silence
        self._members = members
        self._rests: dict[str, float] = {}  # until when (time.monotonic seconds)
        self._snapshots: dict[str, _Snapshot] = {}
        self._upload: _Upload | None = None
        self._loaded_last: tuple[Optimizer, str, int] | None = None
        self._loads, self._loaded = 0, ""

    def rest(self, sender: Member) -> float:
        """Seconds until this member may request a copy of the state again; 0 or less if it may now."""
        return self._rests.get(sender.process, 0.0) - time.monotonic()

    def serve(self, topic: str, body: Body, sender: Member) -> Body:
        """Answer a request. Raises InvalidSettings, and KeyError and the like if malformed."""
        by = body["by"]
        match topic:
            case "state_open":
                began = time.monotonic()
                opened, now = self._open(by), time.monotonic()
                rest = REST * (now - began) / sender.workers
                self._rests[sender.process] = now + min(rest, self._silence / 2)  # a worker that waits does not give up
                return opened
            case "state_read":
                return {"piece": self._opened(by).packed.piece(body["at"])}
            case "state_close":
                self._snapshots.pop(by, None)
                return {}
            case "state_begin":
                return self._start_upload(_Upload(by, body["whole"], body["digest"], body["size"]), body["optimizer"])
        return self._write(by, body["at"], memoryview(body["piece"]))

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

    def _start_upload(self, new: _Upload, name: str) -> Body:
        optimizer = self._optimizer()
        if optimizer.name != name:
            raise InvalidSettings(
                f"the state is that of {name}, and the servers run {optimizer.name}", "set the optimizer that it is of"
            )
        most = 8 * self._most_arrays * sum(self._table.lengths().values()) + 2**20
        if new.size > most:
            raise InvalidSettings(f"state of {new.size} bytes is too much: these keys have {most} at the most")
        if self._loaded_last == (optimizer, new.digest, self._table.updates()):
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
            self._load(upload)
        return {}

    def _load(self, upload: _Upload) -> None:
        if upload.hash.hexdigest() != upload.digest:
            raise InvalidSettings("the state changed in transit")
        most = self._most_arrays * len(self._table.lengths())
        named, optimizer = deserialize(upload.run, most), self._optimizer()
        self._check(named)
        self._table.replace("optimizer", optimizer.states_in(named))
        for entry in self._table.entries.values():  # saved before the writer gets its answer
            self._aggregator.commit(entry)
        self._loads, self._loaded = self._loads + 1, upload.whole
        self._loaded_last = (optimizer, upload.digest, self._table.updates())

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
