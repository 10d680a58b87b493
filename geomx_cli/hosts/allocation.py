"""Allocation of machines to a job: an allocator provides them at launch and releases them at the job's end."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from subprocess import SubprocessError
from typing import Protocol, cast

import msgspec

from geomx_cli.core.errors import CheckFailed, GeomxError
from geomx_cli.core.plugins import Plugin, Spec, find
from geomx_cli.hosts import with_addresses
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Host, Inventory, validated

__all__ = ["Allocation", "Allocator", "allocated", "release"]

_EXPECTED = (GeomxError, OSError, SubprocessError)


class Allocator(Plugin, Protocol):
    """A plug-in that provides the machines of an inventory's hosts; named by the inventory's `allocator`.

    Both functions may raise a GeomxError, an OSError or a SubprocessError, whose text is shown to the user; any other
    exception is reported as a mistake of the allocator.
    """

    def allocate(self, inventory: Inventory, job: str, spec: Spec) -> Iterable[Host]:
        """Return the inventory's hosts in order, each with its machine's `access`, addresses and other
        machine-dependent fields; names, parties, devices and roles must not change. Blocks until all machines are
        usable. Called in the main thread, so that Ctrl-C interrupts it. `job` is the job's id.
        """

    def release(self, job: str) -> None:
        """Release all machines of the job, including those of a failed or interrupted `allocate`. Must be idempotent;
        may be called by another process than `allocate`.
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
    inventory: Inventory, job: str, spec: Spec, ssh: SshOptions, note: Callable[[str], None]
) -> Iterator[Allocation]:
    """Allocate machines for the block; without an allocator the inventory is used as it is. At the end of the block
    they are released unless `kept`; `note` receives progress and warnings.

    Raises the allocator's errors, prefixed with its name, and TypeError if it returns other hosts than requested.
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
    """Release the machines of a job; return error messages. Idempotent."""
    if not inventory.allocator:
        return ()
    try:
        _find(inventory.allocator).release(job)
    except Exception as error:  # of any kind: the outcome of the job must still be reported
        text = str(error) if isinstance(error, _EXPECTED) else repr(error)
        return (f"allocator {inventory.allocator} has not released the machines of {job}: {text}",)
    return ()


def _allocate(inventory: Inventory, job: str, spec: Spec) -> Inventory:
    name = inventory.allocator
    try:
        given = tuple(_find(name).allocate(inventory, job, spec))
    except GeomxError as error:
        raise type(error)(f"allocator {name}: {error.message}", error.hint) from None
    except (OSError, SubprocessError) as error:
        raise CheckFailed(f"allocator {name}: {error}", "see that what it needs is installed and runs") from None
    except Exception as error:
        raise CheckFailed(f"allocator {name} failed: {error!r}", "report it to the allocator's maintainers") from error
    if [_asked(host) for host in given] != [_asked(host) for host in inventory.hosts]:
        raise TypeError(f"allocator {name} gives other hosts than it was asked for")
    return validated({**msgspec.to_builtins(inventory), "hosts": msgspec.to_builtins(given)})


def _asked(host: Host) -> tuple[object, ...]:
    """Return the fields that an allocator must not change, as the plan was validated with them."""
    return host.name, host.parties, host.devices, host.runs


def _find(name: str) -> Allocator:
    return cast(Allocator, find("allocator", name))
