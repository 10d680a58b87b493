"""How machines are reached: a connector runs commands on one, opens streams to it and copies files to and from it.

Nothing else in geomx knows whether a host is this machine or one behind SSH. What is to run there for long (the
agent) detaches itself and outlives the connection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from geomx_cli.core.errors import GeomxError

if TYPE_CHECKING:
    from geomx_cli.hosts.ssh.options import SshOptions
    from geomx_cli.inventory import Host, Inventory

__all__ = ["Channel", "Completed", "Connector", "File", "closing", "connector", "everywhere", "with_addresses"]

_AT_ONCE = 64
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Completed:
    """A command that has ended. `status` is its exit status; negative when a signal ended it, by minus its number
    where that is known.
    """

    status: int
    output: bytes
    errors: bytes


@dataclass(frozen=True)
class File:
    """A file to be put on a host."""

    data: bytes
    mode: int = 0o600


class Channel(Protocol):
    """A command under way on a host: its standard input and output as a byte stream.

    One thread may receive while others send; any thread may close. A connection that breaks ends the stream
    within seconds.
    """

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError once the stream is broken or closed."""

    def receive(self) -> bytes:
        """What has come, at least one byte; b"" when the command has ended or the connection broke."""

    def errors(self) -> str:
        """The last 4 KiB of what the command wrote on its standard error so far; all of it after the end."""

    def close(self) -> None:
        """End its standard input; what it still writes may be received. Closing twice does no harm."""


class Connector(Protocol):
    """The way to one machine of the inventory. Paths are absolute and of that machine. Each method may be called by any
    thread.

    Every method raises HostUnreachable when the machine cannot be reached, and OSError for what it refuses.
    """

    @property
    def name(self) -> str:
        """As the inventory calls it."""

    @property
    def python(self) -> str:
        """The interpreter that has geomx."""

    @property
    def address(self) -> str:
        """What is dialled to reach it, once names that only this user has (in ~/.ssh/config) are looked up. Raises
        InvalidSettings where they cannot be.
        """

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """Run a command with `data` on its standard input to its end, at most `limit` seconds. Then TimedOut; a
        command behind SSH may go on all the same.
        """

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command and return at once. It should end when its standard input does: a connection that
        breaks says no more than that.
        """

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file at once or not at all; folders that are missing are made with mode 0700."""

    def get(self, path: str) -> bytes:
        """A file's content. Raises FileNotFoundError where there is none."""

    def close(self) -> None:
        """Let go of the machine. What has detached itself there keeps running."""


def connector(host: "Host", python: str, ssh: "SshOptions") -> Connector:
    """The connector for `host`, by the type of its `access`. Nothing is connected before it is used.

    `python` is the interpreter where the inventory names none.
    """
    from geomx_cli.inventory import Local, Ssh

    match host.access:
        case Local():
            from geomx_cli.hosts.local import LocalConnector

            return LocalConnector(host.name, host.python or python)
        case Ssh():
            from geomx_cli.hosts.ssh.connector import SshConnector

            return SshConnector(host.name, host.access, host.python or python, options=ssh)


def with_addresses(inventory: "Inventory", ssh: "SshOptions") -> "Inventory":
    """The inventory with an address for each host of which only a name is known that might be this user's own."""
    from geomx_cli.inventory import is_ip

    def with_address(host: "Host") -> "Host":
        if host.address or host.interface or is_ip(host.near_address):
            return host
        found = connector(host, "", ssh).address
        return host if found == host.near_address else host.model_copy(update={"address": found})

    return inventory.with_hosts(map(with_address, inventory.hosts))


def everywhere(do: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Call `do` for each item, up to 64 at a time; the results in the items' order.

    All are carried out whatever happens to the others. If one raised a GeomxError it is raised again; if
    several did, one of the first one's class that has the words of all. Another exception goes before them.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        futures = [pool.submit(do, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise _together(errors)
    return [future.result() for future in futures]


@contextmanager
def closing(hosts: Mapping[str, Connector]) -> Iterator[Mapping[str, Connector]]:
    """Let go of all these hosts at the end."""
    try:
        yield hosts
    finally:
        everywhere(lambda host: host.close(), hosts.values())


def _together(errors: Sequence[BaseException]) -> BaseException:
    known = [error for error in errors if isinstance(error, GeomxError)]
    if len(known) < len(errors):
        return next(error for error in errors if not isinstance(error, GeomxError))
    texts = list(dict.fromkeys(f"{error.message}\n    {error.hint}".rstrip() for error in known))
    if len(texts) == 1:
        return known[0]
    return type(known[0])("\n".join([f"{len(texts)} errors:", *(f"  {text}" for text in texts)]))
