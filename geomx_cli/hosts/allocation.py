"""Machines that a job has for as long as it runs: an allocator gives them at launch and takes them back at the end."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Protocol, cast

from geomx_cli.core.errors import CheckFailed, GeomxError
from geomx_cli.core.plugins import Plugin, Spec, find
from geomx_cli.hosts import with_addresses
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Host, Inventory, validated

__all__ = ["Allocation", "Allocator", "allocated", "release"]


class Allocator(Plugin, Protocol):
    """A plug-in that turns what an inventory asks for into hosts; named by the inventory's `allocator`.

    Both functions may raise a GeomxError, an OSError or a SubprocessError, whose text a user gets to read.
    """

    def allocate(self, inventory: Inventory, job: str, spec: Spec) -> Iterable[Host]:
        """The inventory's hosts in its order, each with the machine that it gets: `access`, addresses and whatever else
        depends on the machine; names, parties, devices and roles stay. Blocks until all of them can be used. Called in
        the main thread, so that Ctrl-C interrupts it. `job` is the job's id.
        """

    def release(self, job: str) -> None:
        """Take back all that the job was given, also by an `allocate` that failed or was interrupted. May be called by
        another process than `allocate`, and again when nothing is left.
        """


@dataclass
class Allocation:
    """`inventory` with the machines of a job. `kept`: the job goes on when the block ends, and so do they. `problems`:
    what went wrong with their release.
    """

    inventory: Inventory
    kept: bool = False
    problems: tuple[str, ...] = ()


@contextmanager
def allocated(
    inventory: Inventory, job: str, spec: Spec, ssh: SshOptions, note: Callable[[str], None]
) -> Iterator[Allocation]:
    """Within, the job has its machines; without an allocator they are those of the inventory. However the block ends,
    they are released unless `kept`; `note` is told what goes wrong with that.

    Raises what the allocator raises, with its name, and TypeError where it gives other hosts than it was asked for.
    """
    allocation = Allocation(inventory)
    try:
        if inventory.allocator:
            note(f"asking {inventory.allocator} for {len(inventory.hosts)} machines")
            allocation.inventory = with_addresses(_allocate(inventory, job, spec), ssh)
        yield allocation
    finally:
        if not allocation.kept:
            allocation.problems = release(inventory, job)
            for problem in allocation.problems:
                note(f"warning: {problem}")


def release(inventory: Inventory, job: str) -> tuple[str, ...]:
    """Give back the machines of a job; what went wrong with that, in words. May be repeated."""
    if not inventory.allocator:
        return ()
    try:
        _find(inventory.allocator).release(job)
    except (GeomxError, OSError, SubprocessError) as error:
        return (f"allocator {inventory.allocator} has not released the machines of {job}: {error}",)
    return ()


def _allocate(inventory: Inventory, job: str, spec: Spec) -> Inventory:
    name = inventory.allocator
    try:
        given = tuple(_find(name).allocate(inventory, job, spec))
    except GeomxError as error:
        raise type(error)(f"allocator {name}: {error.message}", error.hint) from None
    except (OSError, SubprocessError) as error:
        raise CheckFailed(f"allocator {name}: {error}", "see that what it needs is installed and runs") from None
    if [_asked(host) for host in given] != [_asked(host) for host in inventory.hosts]:
        raise TypeError(f"allocator {name} gives other hosts than it was asked for")
    return validated(inventory.with_hosts(given).model_dump())


def _asked(host: Host) -> tuple[object, ...]:
    """What no machine changes: the plan was checked with it."""
    return host.name, host.parties, host.devices, host.runs


def _find(name: str) -> Allocator:
    return cast(Allocator, find("allocator", name))
