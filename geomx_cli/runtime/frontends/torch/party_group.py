"""The process group of a party's workers: gloo on CPUs, NCCL on GPUs."""

import contextlib
import copy
import inspect
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed

from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.runtime.frontends.torch.group_activity import LAST_WAIT, GroupActivity
from geomx_cli.runtime.frontends.torch.group_connections import FOREVER, gloo_of, interface_of, own_address, store_of
from geomx_cli.runtime.training import parting

if TYPE_CHECKING:
    from geomx_cli.contract.settings import Settings
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.bodies import Body

__all__ = ["Gathered", "PartyGroup"]

_POLL = 0.02
_MARKS = 60
"""Number of bits of a gathered number below its marks. The marks are _WISHES and, of the first worker, _STOPS and
_SAVES; see `PartyGroup.use_stops` and `use_saves`.
"""
_WISHES, _STOPS, _SAVES = 1, 2, 4
_CLOSED, _LATE = ("Connection closed", "reset by peer", "Broken pipe"), ("Timed out", "timed out")
"""Texts in errors of gloo and NCCL about a worker that has ended, and about a worker that takes no part."""


class PartyGroup:
    """Collective operations among a party's workers, which all make the same ones in the same order.

    torch.distributed's own functions do not see this group. Call `form` before all other methods. Later failures raise
    PeerLost, because the connections to a worker that ends are closed. A worker that hangs is noticed after the option
    `patience`, counted from the last time at which code of any worker ran (`activity`). Call all methods except `wait`
    in the training thread.

    rank, size: this worker's rank among its party's workers, and their number.
    leads: whether it exchanges with the servers, as rank 0 does.
    stops: whether all stop, as rank 0 announced with the last gather; see `use_stops`.
    gathers, save_is_due: see SavingGroup.
    restarts: whether all workers are started again when one of them is killed. Then the others wait for their end.
    on_failure: called before a PeerLost is raised.
    on_stuck: see GroupActivity.
    """

    def __init__(
        self, settings: "Settings", on_failure: Callable[[GeomxError], object] = lambda _: None,
        on_stuck: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        assert settings.rank is not None
        self.rank, self.size = settings.rank, settings.group_size
        self.leads = self.rank == 0
        self._peer = ""  # which worker has ended, if only one is possible
        if self.size == 2 or not self.leads:
            self._peer = f"{settings.party}/worker:{int(self.leads)}"
        self._settings = settings
        self._on_failure = on_failure
        self._patience = timedelta(seconds=settings.number("patience"))
        self._client: Client | None = None
        self.restarts = bool(settings.state_dir)
        # Before that, the leader waits as long for the servers and the other parties.
        self._limit = settings.number("timeout") * (1 if self.leads else 2)
        if settings.supervised:  # an agent reports a worker that ends before it has joined
            self._limit = FOREVER.total_seconds()
        limit = timedelta(seconds=self._limit)
        with self._connecting():
            self._store = distributed.PrefixStore(settings.job, store_of(settings, limit, leads=self.leads))
            own = distributed.PrefixStore(settings.job, store_of(settings, limit, leads=False))
        self.activity = GroupActivity(settings, own, on_stuck, self._relay)
        self.stops = self._is_wished = False
        self._wishes: Callable[[], bool] | None = None
        self._agrees: Callable[[bool], bool] = bool
        self._posted = 0
        self._gloo: Any = None
        self._nccl: Any = None
        self._parts: list[PartyGroup] = []
        self.gathers = 0
        self.save_is_due = False
        self._wants_save: Callable[[], bool] | None = None

    def part(self, ranks: Sequence[int], name: str) -> "PartyGroup":
        """A group of only some workers, including this one, ranked in this order. Blocks until all of them have called
        this, with the same name. Its failures are failures of the party.
        """
        found = copy.copy(self)
        found.rank, found.size = ranks.index(self.rank), len(ranks)
        found.leads, found._peer = found.rank == 0, ""
        found._store = distributed.PrefixStore(name, self._store)
        found._nccl = found._wants_save = None
        with self._connecting():
            found._gloo = gloo_of(found._store, self._settings, found.rank, found.size)
        self._parts.append(found)
        return found

    def leave(self) -> None:
        """End the threads of gloo, here and in the groups of some workers. No operation may follow.

        The threads need Python to drop tensors. While the interpreter shuts down, this aborts the process.
        """
        self.activity.stop()
        for group in (*self._parts, self):
            group._gloo = None

    def await_end(self) -> None:
        """This worker's script has ended. Wait until all workers' scripts have ended, because all would have to begin
        again if one worker is killed. Without `restarts` this does not wait.
        """
        if not self.restarts:
            return
        try:
            self._await_all("over", FOREVER.total_seconds())
            parting.note_over(self._settings)
            # No worker ends before all have noted this. Otherwise, if a worker is killed now, it would begin again
            # alone.
            self._await_all("noted", LAST_WAIT)
        except RuntimeError:  # the first worker, which has the store, was killed; or all scripts have ended
            self._await_agent(LAST_WAIT if parting.is_over(self._settings) else math.inf)

    def _await_all(self, name: str, limit: float) -> None:
        until = time.monotonic() + limit
        self._store.set(f"{name}/{self.rank}", "")
        keys = [f"{name}/{rank}" for rank in range(self.size)]
        while not self._store.check(keys) and time.monotonic() < until:
            if self._client is not None and self._client.failure is not None:
                raise self._client.failure
            time.sleep(_POLL)

    def _await_agent(self, limit: float = math.inf) -> None:
        """A worker of the group may have been killed. Give the agents time to end this worker too, and to begin again.
        """
        if self.restarts:
            until = time.monotonic() + limit
            knows = parting.is_over(self._settings)
            parting.await_end(
                self._settings,
                lambda: (
                    time.monotonic() > until or (self._client is not None and self._client.failure is not None)
                    or (not knows and parting.is_over(self._settings))  # its agent says that all scripts have ended
                ),
            )  # fmt: skip

    def post(self, row: "Body") -> None:
        """Let the first worker send a row of ModelComparison for this worker, within seconds. Does not wait."""
        with self._translated():
            self._store.set(GroupActivity.post_key(self.rank, self._posted), msgspec.msgpack.encode(row))
        self._posted += 1

    def _relay(self, rank: int, content: bytes) -> None:
        by = f"{self._settings.party}/worker:{rank}"
        with contextlib.suppress(GeomxError, msgspec.DecodeError):  # the job has failed, or another program has posted
            assert self._client is not None  # other workers post once the first has joined
            self._client.control.compare(msgspec.msgpack.decode(content, type=dict[str, Any]), by)

    def publish(self) -> None:
        """Make the party's workers torch.distributed's default group. Blocks until all have called this. Its collective
        operations end after the option `patience`.
        """
        if name := interface_of(own_address(self._settings)):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        by_nccl = torch.cuda.is_available() and distributed.is_nccl_available()
        with self._connecting():
            inspect.unwrap(distributed.init_process_group)(  # PyTorch's own function, not geomx's replacement
                "cpu:gloo,cuda:nccl" if by_nccl else "gloo", rank=self.rank, world_size=self.size,
                store=distributed.PrefixStore("default", self._store), timeout=self._patience,
            )  # fmt: skip

    def form(self, client: "Client | None") -> None:
        """Connect to the party's other workers. Blocks until all have called this. Raises TimedOut after the option
        `timeout`.

        client: the leader's. Its failure is raised in place of this group's failure.
        """
        self._client = client
        self._meet()
        with self._connecting():
            self._gloo = gloo_of(self._store, self._settings, self.rank, self.size)

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            self._await_agent()
            what = f"the workers of party {self._settings.party} do not connect: {_first_line(error)}"
            raise TimedOut(what, "see the logs of the party's other workers") from error

    def _meet(self) -> None:
        keys = [f"here/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], "")
        try:
            self._store.wait(keys, timedelta(seconds=self._limit))
        except RuntimeError:
            absent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if not absent:
                return
            who = " and ".join(f"{self._settings.party}/worker:{rank}" for rank in absent)
            what = f"waited {self._limit:g} s for {who} to call geomx_cli.torch.init"
            raise TimedOut(what, "see the log there; --timeout sets the limit") from None

    def use_gpus(self) -> None:
        """Add and send tensors on GPUs by NCCL. Idempotent. Raises InvalidSettings if torch has no NCCL."""
        if self._nccl is not None:
            return
        if not distributed.is_nccl_available():
            what = f"torch {torch.__version__} has no NCCL, by which the GPUs of a party add gradients (--reduce torch)"
            raise InvalidSettings(what, "install a build with NCCL, or leave --reduce out")
        # NCCL would take the first interface that it finds.
        if "NCCL_SOCKET_IFNAME" not in os.environ and (name := interface_of(own_address(self._settings))):
            os.environ["NCCL_SOCKET_IFNAME"] = name
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = FOREVER
        self._nccl = distributed.ProcessGroupNCCL(
            distributed.PrefixStore("nccl", self._store), self.rank, self.size, options
        )

    def add(self, tensor: Any, *, patient: bool = False) -> Any:
        """Begin to replace a contiguous tensor by its sum over all workers, with the same bits in all. Returns an
        operation for which to wait.

        patient: see `begin_gather`.
        """
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.SUM
        options.timeout = FOREVER if patient or self._settings.supervised else self._patience
        with self._translated():
            work = self._of(tensor).allreduce([tensor], options)
        if not patient:
            self.activity.pending(work)
        return work

    def send(self, tensor: Any, source: int = 0) -> Any:
        """Begin to copy a contiguous tensor from the worker of rank `source` to all. Returns an operation for which to
        wait.
        """
        options = distributed.BroadcastOptions()
        options.rootRank = source
        options.timeout = FOREVER
        with self._translated():
            return self._of(tensor).broadcast([tensor], options)

    def wait(self, work: Any) -> None:
        """Wait for an operation. On a GPU, the current stream waits. Thread-safe. Raises the errors that the class
        names.
        """
        with self._translated():
            work.wait()

    def use_stops(self, wishes: Callable[[], bool], agrees: Callable[[bool], bool]) -> None:
        """From now on, each gather also carries whether a worker `wishes` that all stop, and whether the first worker
        `agrees`; see ScriptStore. So all learn of a stop at the same place, without a further message.
        """
        self._wishes, self._agrees = wishes, agrees

    def note_stops(self, marks: Sequence[int]) -> None:
        """A gather has ended, with these marks of all workers."""
        self.stops, self._is_wished = bool(marks[0] & _STOPS), any(mark & _WISHES for mark in marks)
        self.save_is_due |= bool(marks[0] & _SAVES)

    def _mark(self) -> int:
        saves = _SAVES * (self._wants_save is not None and self.leads and self._wants_save())
        if self._wishes is None:
            return saves
        return saves + _WISHES * self._wishes() + _STOPS * (self.leads and self._agrees(self._is_wished))

    def use_saves(self, wishes: Callable[[], bool]) -> None:
        """See SavingGroup."""
        self._wants_save = wishes

    def begin_gather(self, value: int, *, patient: bool = False) -> "Gathered":
        """Begin to collect every worker's number (at least 0, below 2^60).

        patient: whether to wait without a time limit, because leaders wait for servers.
        """
        self.gathers += 1
        table = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        table[self.rank] = value + (self._mark() << _MARKS)
        return Gathered(self, table, self.add(table, patient=patient))

    def gather(self, value: int, *, patient: bool = False) -> list[int]:
        """Every worker's number, by rank; blocks. patient: see `begin_gather`."""
        return self.begin_gather(value, patient=patient).values

    def gather_bytes(self, data: "Array") -> "Array":
        """Every worker's bytes (1-D, uint8, equally many in all), by rank, of shape (workers, bytes). Blocks."""
        table = torch.zeros((self.size, data.size), dtype=torch.uint8, device="cpu")
        table[self.rank] = torch.tensor(data, device="cpu")
        self.wait(self.add(table))
        gathered: Array = table.numpy()
        return gathered

    def share(self, value: int, source: int = 0) -> int:
        """The number of the worker of rank `source`; blocks."""
        number = torch.tensor([value], device="cpu")
        self.wait(self.send(number, source))
        return int(number[0])

    def share_bytes(self, content: bytes, source: int = 0) -> bytes:
        """The bytes, of any length, of the worker of rank `source`; blocks."""
        size = self.share(len(content), source)
        data = torch.zeros(size, dtype=torch.uint8, device="cpu")
        if self.rank == source and size:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if size:
            self.wait(self.send(data, source))
        return bytes(data.numpy().tobytes())

    def _of(self, tensor: Any) -> Any:
        return self._nccl if tensor.is_cuda else self._gloo

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failure(error, self._peer) from error

    def lost(self, error: RuntimeError) -> GeomxError | None:
        """The meaning of torch.distributed's error for this group: a worker has ended, or hangs; otherwise None."""
        said = str(error)
        return self._failure(error, "") if any(words in said for words in (*_CLOSED, *_LATE)) else None

    def _failure(self, error: RuntimeError, peer: str) -> GeomxError:
        self._await_agent()
        if self._client is not None and self._client.failure is not None:
            return self._client.failure
        party = self._settings.party
        # If this worker does not know which worker has ended, the agent of that worker's host reports it, and its
        # report takes precedence.
        who = peer or f"another worker of party {party}"
        closed = any(words in str(error) for words in _CLOSED)
        what = "has ended" if closed else f"has ended, or is out of step: {_first_line(error)}"
        failure = PeerLost(f"{who} {what}", "see its log", peer=peer or f"{party}/worker")
        self._on_failure(failure)
        return failure


class Gathered:
    """The numbers that `PartyGroup.begin_gather` collects."""

    def __init__(self, group: PartyGroup, table: Any, work: Any) -> None:
        self._group, self._table, self._work = group, table, work

    @property
    def values(self) -> list[int]:
        """The numbers by rank. Blocks until all have arrived. Thread-safe."""
        self._group.wait(self._work)
        values = [int(value) for value in self._table]
        self._group.note_stops([value >> _MARKS for value in values])
        return [value & ((1 << _MARKS) - 1) for value in values]


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
