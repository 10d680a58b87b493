"""Placement of a party's schedulers and servers on its hosts. Pure functions."""

from collections.abc import Iterator

from geomx_cli.inventory import Host, HostError, Inventory
from geomx_cli.ps.cluster.config import Role

__all__ = ["hosts_for", "placement_errors", "roles"]


def roles(inventory: Inventory, party: str) -> tuple[Role, ...]:
    """Return the roles of a party, besides workers."""
    central = inventory.central
    if inventory.topology == "flat":
        return ("scheduler", "server") if party == central.name else ()
    everywhere: tuple[Role, ...] = ("global_server",) if inventory.topology == "spread" else ()
    if party != central.name:
        return (*everywhere, "scheduler", "server")
    if inventory.topology == "central":
        return ("global_scheduler", "global_server", "scheduler")
    trains: tuple[Role, ...] = (*everywhere, "scheduler", "server")
    return ("global_scheduler", *(trains if central.workers else ("scheduler",)))


def hosts_for(inventory: Inventory, party: str, role: Role, count: int = 1) -> tuple[Host, ...]:
    """Return the hosts of `count` processes of a role: the hosts whose `runs` has it, round-robin.

    If no host names the role, a scheduler is placed on the party's first host without `runs`, and servers on all such
    hosts round-robin. Requires an inventory without `placement_errors`.
    """
    hosts = _candidates(inventory, party, role)
    return tuple(hosts[place % len(hosts)] for place in range(count))


def placement_errors(inventory: Inventory) -> tuple[HostError, ...]:
    """Return all errors in the `runs` of hosts."""
    names = [party.name for party in (inventory.central, *inventory.parties)]
    return tuple(problem for name in names for problem in _of_party(inventory, name))


def _of_party(inventory: Inventory, party: str) -> Iterator[HostError]:
    hosts, own = inventory.hosts_of(party), roles(inventory, party)
    known = f"it has {', '.join(own)}" if own else "it has workers only"
    wrong = False
    for host in hosts:
        for role in host.runs:
            if not any(role in roles(inventory, other) for other in host.parties):
                wrong = True
                what = f"party {party} has no {role} with topology {inventory.topology}"
                yield HostError(host.name, "runs", what, f"take {role} out of runs; {known}")
    for role in own:
        named = [host.name for host in hosts if role in host.runs]
        if role.endswith("scheduler") and len(named) > 1:
            what = f"{role} of party {party} is to run on {' and '.join(named)}, and there is one"
            yield HostError(named[1], "runs", what, f"leave it in runs of {named[0]} only")
        if not wrong and not _candidates(inventory, party, role):
            names = ", ".join(host.name for host in hosts)
            what = f"no host of party {party} runs its {role}"
            yield HostError(hosts[0].name, "runs", what, f'add "{role}" to runs of one of its hosts: {names}')


def _candidates(inventory: Inventory, party: str, role: Role) -> tuple[Host, ...]:
    hosts = inventory.hosts_of(party)
    named = tuple(host for host in hosts if role in host.runs)
    free = tuple(host for host in hosts if not host.runs)
    return named or (free[:1] if role.endswith("scheduler") else free)
