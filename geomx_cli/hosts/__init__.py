"""Access to machines: a connector runs commands on a host, opens streams to it and copies files.

The rest of geomx is independent of whether a host is local or behind SSH. Long-running programs (the agent) detach
themselves and outlive the connection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.hosts.interface import Channel, Completed, Connector, File

if TYPE_CHECKING:
    from geomx_cli.hosts.ssh.options import SshOptions
    from geomx_cli.inventory import Host, Inventory, Local, Requested, Slurm, Ssh

__all__ = [
    "Channel", "Completed", "Connector", "File", "closing", "connector", "everywhere", "merged", "reach",
    "with_addresses",
]  # fmt: skip

_AT_ONCE = 64
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def connector(host: "Host", python: str, ssh: "SshOptions") -> Connector:
    """Return the connector for `host`, chosen by the type of its `access`. It connects on first use.

    `python` is the interpreter if the inventory names none.
    """
    return reach(host.name, host.access, host.python or python, ssh)


def reach(name: str, access: "Local | Requested | Slurm | Ssh", python: str, ssh: "SshOptions") -> Connector:
    """As `connector`, for a machine that need not be a host. Raises InvalidSettings for one that is given at launch."""
    from geomx_cli.inventory import Local, Slurm, Ssh

    match access:
        case Local():
            from geomx_cli.hosts.local import LocalConnector

            return LocalConnector(name, python)
        case Ssh():
            from geomx_cli.hosts.ssh.connector import SshConnector

            return SshConnector(name, access, python, options=ssh)
        case Slurm():
            from geomx_cli.hosts.slurm import SlurmConnector

            return SlurmConnector(name, access, python, reach(name, access.login, python, ssh))
    raise InvalidSettings(f"host {name} gets its machine at launch", "this works with hosts that name their machine")


def with_addresses(inventory: "Inventory", ssh: "SshOptions") -> "Inventory":
    """Resolve the addresses of hosts known only by a name that may be private to this user (an ssh_config alias)."""
    from msgspec import structs

    from geomx_cli.inventory import Requested, is_ip

    def with_address(host: "Host") -> "Host":
        if isinstance(host.access, Requested) or host.address or host.interface or is_ip(host.near_address):
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
    """Merge these errors into one; see `everywhere`."""
    known = [error for error in errors if isinstance(error, GeomxError)]
    if len(known) < len(errors):
        return next(error for error in errors if not isinstance(error, GeomxError))
    texts = list(dict.fromkeys(f"{error.message}\n    {error.hint}".rstrip() for error in known))
    if len(texts) == 1:
        return known[0]
    return type(known[0])("\n".join([f"{len(texts)} errors:", *(f"  {text}" for text in texts)]))
