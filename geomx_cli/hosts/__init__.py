"""How to reach a host: one small interface, one module for each way.

Nothing else in geomx knows whether a host is this machine or one behind SSH. What is to run there for long (the
agent) detaches itself and outlives the connection.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from geomx_cli.core.errors import GeomxError
from geomx_cli.hosts.credentials import Credentials

if TYPE_CHECKING:
    from geomx_cli import inventory

__all__ = ["Channel", "Completed", "File", "Host", "SshOptions", "closing", "everywhere", "open_host"]

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


@dataclass(frozen=True)
class SshOptions:
    """What holds for all hosts behind SSH; give the same object to all, so that a passphrase is asked for once.

    `config`: the user's own ssh_config, which need not exist. `notify` gets what a user should read; any
    thread calls it.
    """

    accept_new_host_keys: bool = False
    config: str = "~/.ssh/config"
    known_hosts: str = "~/.ssh/known_hosts"
    notify: Callable[[str], None] = lambda text: None
    credentials: Credentials = field(default_factory=Credentials)


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


class Host(Protocol):
    """One machine of the inventory. Paths are absolute and of that machine. Each method may be called by any
    thread.

    Every method raises HostUnreachable when the machine cannot be reached, and OSError for what it refuses.
    """

    @property
    def name(self) -> str:
        """As the inventory calls it."""

    @property
    def python(self) -> str:
        """The interpreter that has geomx."""

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


def open_host(host: "inventory.Host", python: str, ssh: SshOptions) -> Host:
    """`host` of the inventory, on this machine or behind SSH. Nothing is connected before it is used.

    `python` is the interpreter where the inventory names none.
    """
    if host.ssh is None:
        from geomx_cli.hosts.local import LocalHost

        return LocalHost(host.name, os.path.expanduser(host.python) or python)  # noqa: PTH111 - a command stays one
    from geomx_cli.hosts.ssh import SshHost

    return SshHost(host.name, host.ssh, host.python or python, options=ssh)


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
def closing(hosts: Mapping[str, Host]) -> Iterator[Mapping[str, Host]]:
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
