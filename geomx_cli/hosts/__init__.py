"""Access to machines: a connector runs commands on a host, opens streams to it and copies files.

The rest of geomx is independent of whether a host is local or behind SSH. Long-running programs (the agent) detach
themselves and outlive the connection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from geomx_cli.core.errors import GeomxError

if TYPE_CHECKING:
    from geomx_cli.hosts.ssh.options import SshOptions
    from geomx_cli.inventory import Host, Inventory

__all__ = [
    "Channel", "Completed", "Connector", "File", "closing", "connector", "everywhere", "merged", "with_addresses",
]  # fmt: skip

_AT_ONCE = 64
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Completed:
    """A finished command. `status` is its exit status, or the negated number of the signal that ended it, if known."""

    status: int
    output: bytes
    errors: bytes


@dataclass(frozen=True)
class File:
    """A file to be written to a host."""

    data: bytes
    mode: int = 0o600


class Channel(Protocol):
    """A running command on a host, with its stdin and stdout as a byte stream.

    One thread may receive while others send; any thread may close. A broken connection ends the stream within
    seconds.
    """

    def send(self, data: bytes) -> None:
        """Send all of `data`. Raises OSError if the stream is broken or closed."""

    def receive(self) -> bytes:
        """Receive at least one byte; b"" if the command has ended or the connection is broken."""

    def errors(self) -> str:
        """Return the last 4 KiB of the command's stderr so far; complete after the end."""

    def close(self) -> None:
        """Close its stdin; remaining output may still be received. Idempotent."""


class Connector(Protocol):
    """Access to one host of the inventory. Paths are absolute paths on that host. Thread-safe.

    Output of a command is the command's own: what the account's start-up files print is not part of it. Every method
    raises HostUnreachable if the host cannot be reached, and OSError if the operation is rejected.
    """

    @property
    def name(self) -> str:
        """Its name in the inventory."""

    @property
    def python(self) -> str:
        """The interpreter that has geomx."""

    @property
    def address(self) -> str:
        """The address that is dialled, with aliases of the user's ~/.ssh/config resolved. Raises InvalidSettings if
        they cannot be.
        """

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """Run a command to completion with `data` as its stdin. Raises TimedOut after `limit` seconds; over SSH the
        command may keep running.
        """

    def open(self, argv: Sequence[str]) -> Channel:
        """Start a command without waiting for it. It should exit at the end of its stdin, the only sign of a broken
        connection.
        """

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """Write a file atomically; missing folders are created with mode 0700."""

    def get(self, path: str) -> bytes:
        """Read a file. Raises FileNotFoundError."""

    def check_files(self) -> None:
        """Check that files can be transferred, before any has to be."""

    def close(self) -> None:
        """Disconnect. Detached processes keep running."""


def connector(host: "Host", python: str, ssh: "SshOptions") -> Connector:
    """Return the connector for `host`, chosen by the type of its `access`. It connects on first use.

    `python` is the interpreter if the inventory names none.
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
    """Resolve the addresses of hosts known only by a name that may be private to this user (an ssh_config alias)."""
    from msgspec import structs

    from geomx_cli.inventory import is_ip

    def with_address(host: "Host") -> "Host":
        if host.address or host.interface or is_ip(host.near_address):
            return host
        found = connector(host, "", ssh).address
        return host if found == host.near_address else structs.replace(host, address=found)

    return inventory.with_hosts(map(with_address, inventory.hosts))


def everywhere(do: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """Call `do` for each item, up to 64 concurrently; return the results in order.

    All calls run to completion. A single GeomxError is raised again; several are merged into one of the first one's
    class. Other exceptions take precedence. An interrupt (Ctrl-C) cancels calls that have not begun and does not wait
    for the others: close what they use.
    """
    each = list(items)
    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        futures = [pool.submit(do, item) for item in each]
        wait(futures)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise merged(errors)
    return [future.result() for future in futures]


@contextmanager
def closing(hosts: Mapping[str, Connector]) -> Iterator[Mapping[str, Connector]]:
    """Close all these hosts at the end of the block."""
    try:
        yield hosts
    finally:
        everywhere(lambda host: host.close(), hosts.values())


def merged(errors: Sequence[BaseException]) -> BaseException:
    """Return one error for all of them: see `everywhere`."""
    known = [error for error in errors if isinstance(error, GeomxError)]
    if len(known) < len(errors):
        return next(error for error in errors if not isinstance(error, GeomxError))
    texts = list(dict.fromkeys(f"{error.message}\n    {error.hint}".rstrip() for error in known))
    if len(texts) == 1:
        return known[0]
    return type(known[0])("\n".join([f"{len(texts)} errors:", *(f"  {text}" for text in texts)]))
