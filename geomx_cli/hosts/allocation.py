"""Allocation of machines to a job: an allocator provides them at launch and releases them at the job's end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Protocol, TypeVar, cast

import msgspec

from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, TimedOut, WrongHostKey
from geomx_cli.core.plugins import Plugin, Spec, find
from geomx_cli.core.units import counted, format_duration
from geomx_cli.hosts import reach, with_addresses
from geomx_cli.hosts.interface import Connector
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Host, Inventory, Local, Request, Ssh, validated

__all__ = ["Allocation", "Allocator", "Present", "Waiting", "allocated", "release"]

_EXPECTED = (GeomxError, OSError, SubprocessError)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
_UNREACHABLE = 900.0  # seconds for a login node to answer again, as a queue may take longer than the network holds
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Waiting:
    """What a request waits for, as a phrase; `more` may change often, such as its place in a queue.

    limit: seconds for which it may wait for this, 0: any time. hint: what to do then.
    """

    why: str
    more: str = ""
    limit: float = 0.0
    hint: str = ""

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.why, self.more]))


@dataclass(frozen=True)
class Present:
    """An allocation in which geomx was started. title: "Slurm job 12". nodes: as the batch system lists them. devices:
    of each node, in their order. threads: for each of its workers.
    """

    allocator: str
    job: int
    title: str
    nodes: str
    devices: Mapping[str, Sequence[str]]
    threads: int = 1


class Allocator(Plugin, Protocol):
    """A plug-in that provides the machines of an inventory's hosts; named by the key `allocator` of these hosts.

    All functions may raise a GeomxError, an OSError or a SubprocessError, whose text is shown to the user; any other
    exception is reported as a mistake of the allocator. They are called in the main thread, so that Ctrl-C interrupts
    them. `job` is the job's id. `login` runs commands on the login node; its `python` is that of the machines.

    A module may have two more attributes. shares_files: whether machines share the files of their login node. present:
    a function that returns from the environment the allocation in which geomx was started, a Present, or None.
    """

    def ask(self, request: Request, hosts: Sequence[Host], job: str, spec: Spec, login: Connector) -> None:
        """Ask for the machines of these hosts, without waiting for them."""

    def given(
        self, request: Request, hosts: Sequence[Host], job: str, login: Connector
    ) -> Sequence[Host] | Waiting:
        """Return the hosts in order, each with its machine's `access`, addresses and other machine-dependent fields,
        once all machines are usable; names, parties, devices and roles must not change. Until then return what they
        wait for. Called again every few seconds until the machines of all requests are there.
        """

    def release(self, request: Request, job: str, login: Connector) -> str:
        """Release all machines of the request, including those of a failed or interrupted one. Must be idempotent; may
        be called by another process than `ask`. Return why they were taken from the job before, as a sentence, or "".
        """


@dataclass
class Allocation:
    """An `inventory` with the machines of a job. `kept`: the job outlives the block and keeps its machines.
    `problems`: errors of the release.
    """

    inventory: Inventory
    kept: bool = False
    problems: tuple[str, ...] = ()


@contextmanager
def allocated(
    inventory: Inventory, job: str, spec: Spec, ssh: SshOptions, python: str, note: Callable[[str], None],
    set_status: Callable[[str], None] = lambda text: None,
) -> Iterator[Allocation]:  # fmt: skip
    """Allocate machines for the block; without requests the inventory is used as it is. At the end of the block they
    are released unless `kept`; `note` receives progress and warnings, `set_status` what all wait for.

    python: on the machines, where the inventory names none. Raises the allocators' errors, prefixed with their name,
    and TypeError if one returns other hosts than requested.
    """
    allocation = Allocation(inventory)
    try:
        if inventory.requests:
            with _asked(inventory, job, ssh, python) as requests:
                allocation.inventory = with_addresses(_allocate(requests, inventory, spec, note, set_status), ssh)
        yield allocation
    finally:
        if not allocation.kept:
            was_given = allocation.inventory is not inventory  # otherwise an error says why not
            allocation.problems = release(inventory, job, ssh, python, note if was_given else lambda text: None)
            for problem in allocation.problems:
                note(f"warning: {problem}")


def release(
    inventory: Inventory, job: str, ssh: SshOptions | None = None, python: str = "python3",
    note: Callable[[str], object] = lambda text: None,
) -> tuple[str, ...]:  # fmt: skip
    """Release the machines of a job; return error messages. Idempotent. `note` is told why machines were taken away."""
    problems = []
    with _asked(inventory, job, ssh or SshOptions(), python) as requests:
        for asked in requests:
            try:
                if why := asked.release():
                    note(f"warning: {why}")
            except Exception as error:  # of any kind: the outcome of the job must still be reported
                text = str(error) if isinstance(error, _EXPECTED) else repr(error)
                allocator = asked.request.allocator
                problems.append(f"allocator {allocator} has not released the machines of {job}: {text}")
    return tuple(dict.fromkeys(problems))


@contextmanager
def _asked(inventory: Inventory, job: str, ssh: SshOptions, python: str) -> Iterator[list["_Asked"]]:
    """The requests of a job, during the block. Those with the same login node share a connection to it, as each one may
    cost a person a second factor.
    """
    sharing: dict[tuple[Local | Ssh, str], list[Request]] = {}
    for request in inventory.requests:
        sharing.setdefault((request.login, request.python or python), []).append(request)
    with ExitStack() as stack:
        made: dict[str, Connector] = {}
        for (login, program), requests in sharing.items():
            names = [request.name for request in requests]
            connector = reach(" and ".join(names), login, program, ssh)  # connects on first use
            stack.callback(connector.close)
            made |= dict.fromkeys(names, connector)
        yield [_Asked(request, inventory, job, made[request.name]) for request in inventory.requests]


def _allocate(
    requests: "Sequence[_Asked]", inventory: Inventory, spec: Spec, note: Callable[[str], None],
    set_status: Callable[[str], None],
) -> Inventory:  # fmt: skip
    """Ask for all machines, and wait until all are there: those that come first are held for the others."""
    for asked in requests:
        asked.ask(spec, note)
    pause = _FIRST_PAUSE
    while True:
        for asked in requests:
            asked.look(note)
        waiting = [f"{asked.request.name} waits {asked.waiting}" for asked in requests if asked.waiting is not None]
        if not waiting:
            break
        set_status("; ".join(waiting))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    hosts = {host.name: host for asked in requests for host in asked.hosts}
    given = [hosts.get(host.name, host) for host in inventory.hosts]
    return validated({**msgspec.to_builtins(inventory), "hosts": msgspec.to_builtins(given)})


class _Asked:
    """A request of a job. hosts: with their machines, once `waiting` is None."""

    def __init__(self, request: Request, inventory: Inventory, job: str, login: Connector) -> None:
        self.request = request
        self.hosts = inventory.hosts_for(request)
        self.waiting: Waiting | None = Waiting("")
        self._asked = self.hosts
        self._job = job
        self._login = login
        self._said = ""
        self._answered = self._since = time.monotonic()  # since: it has waited for what was said

    def ask(self, spec: Spec, note: Callable[[str], None]) -> None:
        """Ask the allocator."""
        request = self.request
        if not request.job:
            note(f"asking {request.allocator} for {counted(len(self.hosts), 'machine')} ({request.name})")
        self._call(lambda plugin, login: plugin.ask(request, self._asked, self._job, spec, login))

    def look(self, note: Callable[[str], None]) -> None:
        """See what the request waits for; `note` is told when that changes."""
        found: Sequence[Host] | Waiting
        try:
            found = self._call(lambda plugin, login: plugin.given(self.request, self._asked, self._job, login))
        except (HostUnreachable, TimedOut) as error:
            if isinstance(error, WrongHostKey) or time.monotonic() - self._answered > _UNREACHABLE:
                raise
            found = Waiting("for its login node to answer", error.message)
        else:
            self._answered = time.monotonic()
        if isinstance(found, Waiting):
            self.waiting = found
            if found.why != self._said:
                self._said, self._since = found.why, time.monotonic()
                note(f"{self.request.name} waits {found}")
            elif found.limit and time.monotonic() - self._since > found.limit:
                what = f"{self.request.name} has waited {format_duration(found.limit)} {found}"
                raise CheckFailed(f"allocator {self.request.allocator}: {what}", found.hint)
            return
        if [_fixed(host) for host in found] != [_fixed(host) for host in self._asked]:
            raise TypeError(f"allocator {self.request.allocator} gives other hosts than it was asked for")
        if self.waiting is not None and not self.request.job:
            note(f"{self.request.name} has its {counted(len(found), 'machine')}")
        self._said = ""
        self.waiting, self.hosts = None, tuple(found)

    def release(self) -> str:
        """Release the machines; return why they were taken away before. Raises what the allocator does."""
        return _find(self.request.allocator).release(self.request, self._job, self._login)

    def _call(self, do: Callable[[Allocator, Connector], _Result]) -> _Result:
        name = self.request.allocator
        try:
            return do(_find(name), self._login)
        except GeomxError as error:
            raise type(error)(f"allocator {name}: {error.message}", error.hint) from None
        except (OSError, SubprocessError) as error:
            raise CheckFailed(f"allocator {name}: {error}", "see that what it needs is installed and runs") from None
        except Exception as error:
            hint = "report it to the allocator's maintainers"
            raise CheckFailed(f"allocator {name} failed: {error!r}", hint) from error


def _fixed(host: Host) -> tuple[object, ...]:
    """Return the fields that an allocator must not change, as the plan was validated with them."""
    return host.name, host.parties, host.devices, host.runs


def _find(name: str) -> Allocator:
    return cast(Allocator, find("allocator", name))
