"""Chooses the topology of a job whose user leaves that to geomx. Pure functions.

Spread is the faster one wherever it works: each party's link carries less, and none carries the traffic of all parties.
The inventory tells beforehand whether it works; preflight, which dials, may find later that parties do not reach each
other.
"""

from typing import Protocol

from msgspec import structs

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.inventory import HostError, Inventory
from geomx_cli.plan.ports import host_errors

__all__ = ["in_central", "topology_line", "with_topology"]


class _Chosen(Protocol):
    """A plan or an inventory."""

    @property
    def topology(self) -> str: ...

    @property
    def topology_reason(self) -> str: ...


def topology_line(chosen: _Chosen) -> str:
    """Return a line with the topology and, if geomx has chosen it, the reason."""
    return f"topology {chosen.topology}" + f": {chosen.topology_reason}" * bool(chosen.topology_reason)


def with_topology(inventory: Inventory) -> Inventory:
    """Return the inventory with a topology; unchanged if its user chose one.

    The choice depends on the rank scope, so it is made anew when that changes. Where neither topology can be planned it
    is central, whose errors the caller reports.
    """
    if not inventory.topology_is_automatic:
        return inventory
    training = [party.name for party in (inventory.central, *inventory.parties) if party.workers]
    if len(training) < 2:
        return in_central(inventory, f"only {training[0]} trains")
    spread = structs.replace(inventory, topology="spread")
    if obstacle := _obstacle(spread):
        return in_central(inventory, obstacle)
    local = all(host.shares_files for host in inventory.hosts)
    where = ", all on this machine" if local else " and their hosts reach each other"
    return structs.replace(spread, topology_reason=f"{len(training)} parties train{where}")


def in_central(inventory: Inventory, reason: str) -> Inventory:
    """Return the inventory with topology central, which geomx has chosen for `reason`, a clause."""
    return structs.replace(inventory, topology="central", topology_reason=reason)


def _obstacle(spread: Inventory) -> str:
    """Return why no job can be planned on the inventory; "" if one can."""
    try:
        errors = host_errors(spread)
    except InvalidSettings as error:
        return error.message
    return _described(errors[0]) if errors else ""


def _described(error: HostError) -> str:
    if error.key == "reachable_from":
        return f"not all parties reach host {error.host}"
    if error.key == "ports":
        return f"{error.message}, with spread"
    return f"host {error.host}: {error.message}"
