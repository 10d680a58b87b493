"""How machines are reached: a connector runs commands on one, opens streams to it and copies files to and from it.

Nothing else in geomx knows whether a host is this machine or one behind SSH. What is to run there for long (the
agent) detaches itself and outlives the connection.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from geomx_cli.core.errors import GeomxError
from geomx_cli.hosts.interface import Channel, Completed, Connector, File

if TYPE_CHECKING:
    from geomx_cli.hosts.ssh.options import SshOptions
    from geomx_cli.inventory import Host, Inventory

__all__ = ["Channel", "Completed", "Connector", "File", "closing", "connector", "everywhere", "with_addresses"]

_AT_ONCE = 64
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


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
