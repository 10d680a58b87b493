"""The process group of a party's workers: gloo on CPUs, NCCL on GPUs."""

import contextlib
import os
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import distributed

from geomx_cli.core.errors import GeomxError, InvalidSettings, PeerLost, TimedOut
from geomx_cli.ps.net import addresses

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.settings import Settings

__all__ = ["PartyGroup"]

_FOREVER = timedelta(days=30)
"""Limit of waits for the leader, whose own waits for servers have limits."""


class PartyGroup:
    """Collective operations among a party's workers, which all make the same ones in the same order.

    rank, size: of this worker, among its party's. leads: whether it exchanges with the servers, as rank 0 does. It is
    no group of torch.distributed's own functions. Call `form` before all other methods. What fails later is raised as
    PeerLost, as the connections to a worker that ends are closed; a worker that hangs is noticed after the option
    `patience`. For the training thread, but for `wait`.
    """

    def __init__(self, settings: "Settings") -> None:
        assert settings.rank is not None
        self.rank, self.size = settings.rank, settings.group_size
        self.leads = self.rank == 0
        self._settings = settings
        self._patience = timedelta(seconds=settings.number("patience"))
        self._client: Client | None = None
        # The leader first waits as long for the servers and the other parties.
        self._limit = settings.number("timeout") * (1 if self.leads else 2)
        with self._connecting():
            self._store = distributed.PrefixStore(settings.job, _store(settings, timedelta(seconds=self._limit)))
        self._gloo: Any = None
        self._nccl: Any = None

    def form(self, client: "Client | None") -> None:
        """Connect to the party's other workers; blocks until all have called this, and raises TimedOut after the option
        `timeout`. client: the leader's, whose failure is raised in place of this group's.
        """
        self._client = client
        self._meet()
        with self._connecting():
            self._gloo = _gloo(self._store, self._settings)

    @contextlib.contextmanager
    def _connecting(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
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
        """Add and send tensors on GPUs by NCCL. Idempotent. Raises InvalidSettings if torch has none."""
        if self._nccl is not None:
            return
        if not distributed.is_nccl_available():
            what = f"torch {torch.__version__} has no NCCL, by which the GPUs of a party add gradients (--reduce torch)"
            raise InvalidSettings(what, "install a build with NCCL, or leave --reduce out")
        # NCCL would take the first interface that it finds.
        if "NCCL_SOCKET_IFNAME" not in os.environ and (name := _interface_of(_own_address(self._settings))):
            os.environ["NCCL_SOCKET_IFNAME"] = name
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = _FOREVER
        self._nccl = distributed.ProcessGroupNCCL(
            distributed.PrefixStore("nccl", self._store), self.rank, self.size, options
        )

    def add(self, tensor: Any) -> Any:
        """Begin to replace a contiguous tensor by its sum over all workers, the same bits in all; wait for what is
        returned.
        """
        options = distributed.AllreduceOptions()
        options.reduceOp = distributed.ReduceOp.SUM
        options.timeout = self._patience
        with self._translated():
            return self._of(tensor).allreduce([tensor], options)

    def send(self, tensor: Any, source: int = 0) -> Any:
        """Begin to copy a contiguous tensor from the worker of rank `source` to all; wait for what is returned."""
        options = distributed.BroadcastOptions()
        options.rootRank = source
        options.timeout = _FOREVER
        with self._translated():
            return self._of(tensor).broadcast([tensor], options)

    def wait(self, work: Any) -> None:
        """Wait for an operation; on a GPU, the current stream does. Thread-safe. Raises as the class says."""
        with self._translated():
            work.wait()

    def begin_gather(self, value: int) -> "Gathered":
        """Begin to collect every worker's number, from 0."""
        table = torch.zeros(self.size, dtype=torch.int64)
        table[self.rank] = value
        return Gathered(self, table, self.add(table))

    def gather(self, value: int) -> list[int]:
        """Every worker's number, by rank; blocks."""
        return self.begin_gather(value).values

    def gather_bytes(self, data: "Array") -> "Array":
        """Every worker's bytes (1-D, uint8, as many in all), by rank, of shape (workers, bytes); blocks."""
        table = torch.zeros((self.size, data.size), dtype=torch.uint8)
        table[self.rank] = torch.tensor(data)
        self.wait(self.add(table))
        gathered: Array = table.numpy()
        return gathered

    def share(self, value: int, source: int = 0) -> int:
        """The number of the worker of rank `source`; blocks."""
        number = torch.tensor([value])
        self.wait(self.send(number, source))
        return int(number[0])

    def share_bytes(self, content: bytes, source: int = 0) -> bytes:
        """The bytes, of any length, of the worker of rank `source`; blocks."""
        size = self.share(len(content), source)
        data = torch.zeros(size, dtype=torch.uint8)
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
            raise self._failure(error) from error

    def _failure(self, error: RuntimeError) -> GeomxError:
        if self._client is not None and self._client.failure is not None:
            return self._client.failure
        party = self._settings.party
        # The leader does not know which worker has ended; the agent there does, and outranks this.
        peer = f"{party}/worker" if self.leads else f"{party}/worker:0"
        who = f"another worker of party {party}" if self.leads else peer
        closed = any(words in str(error) for words in ("Connection closed", "reset by peer", "Broken pipe"))
        what = "has ended" if closed else f"has ended, or is out of step: {_first_line(error)}"
        return PeerLost(f"{who} {what}", "see its log", peer=peer)


class Gathered:
    """The numbers that `PartyGroup.begin_gather` collects."""

    def __init__(self, group: PartyGroup, table: Any, work: Any) -> None:
        self._group, self._table, self._work = group, table, work

    @property
    def values(self) -> list[int]:
        """The numbers by rank; blocks until all are here. Thread-safe."""
        self._group.wait(self._work)
        return [int(value) for value in self._table]


def _store(settings: "Settings", limit: timedelta) -> Any:
    """The store in which the workers find each other's addresses; rank 0 listens, at the planned address only."""
    if settings.group_size == 1:
        return distributed.HashStore()
    host, port = _place(settings.rendezvous[0])
    leads = settings.rank == 0
    listener = None
    if leads:
        own = _place(settings.rendezvous[-1])
        family = socket.AF_INET6 if ":" in own[0] else socket.AF_INET
        listener = socket.create_server(own, family=family, backlog=1024, dualstack_ipv6=own[0] == "::").detach()
    return distributed.TCPStore(
        host, port, settings.group_size, is_master=leads, timeout=limit, wait_for_workers=False,
        master_listen_fd=listener,
    )  # fmt: skip


def _gloo(store: Any, settings: "Settings") -> Any:
    """The group for CPUs. It listens at this host's address in the party's network, on ports of the kernel's choice."""
    gloo = distributed.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _FOREVER
    options._devices = [gloo.create_device(hostname=_own_address(settings))]
    return gloo(distributed.PrefixStore("gloo", store), settings.rank, settings.group_size, options)


def _own_address(settings: "Settings") -> str:
    """This host's IP address in the network in which it reaches the first worker of the party."""
    if settings.group_size == 1:
        return "127.0.0.1"
    return addresses.facing(*_place(settings.rendezvous[0]))


def _interface_of(address: str) -> str:
    """The name of the network interface that has this address; "" if none has."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""


def _place(endpoint: str) -> tuple[str, int]:
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return address.strip("[]"), int(port)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
