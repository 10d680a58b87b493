"""The topology of a job: the members of each plane, their hosts, and the links. Pure functions.

A plane has the name of the party whose scheduler leads it, or is "global".
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from geomx_cli.contract.config import Role
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import counted
from geomx_cli.inventory import Host, HostError, Inventory, Party
from geomx_cli.plan.peers import link_peers
from geomx_cli.plan.topology_node import TopologyNode

__all__ = [
    "GLOBAL", "Plane", "TopologyLink", "TopologyNode", "build_topology", "group_links", "hosts_for", "links",
    "placement_errors", "planes", "reachability_errors", "roles",
]  # fmt: skip

# Placement of a party's schedulers and servers on its hosts. Pure functions.


def roles(inventory: Inventory, party: str) -> tuple[Role, ...]:
    """Return the roles of a party, except workers."""
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


GLOBAL = "global"


@dataclass
class Plane:
    """The members of one plane: its scheduler, its servers and their clients.

    A local server is a server of its party's plane and a client of the global one.
    """

    leader: TopologyNode
    servers: list[TopologyNode] = field(default_factory=list)
    clients: list[TopologyNode] = field(default_factory=list)


@dataclass(frozen=True)
class TopologyLink:
    """A connection from `dialler` to `listener` in `plane`."""

    dialler: TopologyNode
    listener: TopologyNode
    plane: str

    @property
    def wide_area(self) -> bool:
        """Whether it connects two parties."""
        return self.dialler.party != self.listener.party

    @property
    def near(self) -> bool:
        """Whether both ends are on one planned host."""
        return self.dialler.host.name == self.listener.host.name


def build_topology(inventory: Inventory) -> tuple[TopologyNode, ...]:
    """Return every process: the central party first, then the participating ones in order.

    In topology "spread", and with `central_server`, a central party that trains becomes the last participating party:
    it has its own local server, and its first worker is the master. With rank scope "global" the master is global
    rank 0, and a central party that does not train has no worker. Raises InvalidSettings for a role that cannot be
    placed as the inventory requests, and for links that a delivery needs and the hosts do not permit.
    """
    for problem in placement_errors(inventory):
        raise InvalidSettings(f"host {problem.host}: {problem.message}", problem.hint)
    nodes = tuple(_flat(inventory) if inventory.topology == "flat" else _hierarchy(inventory))
    if inventory.reduce == "torch":
        nodes = tuple(_grouped(nodes, inventory.shards))
    return link_peers(nodes, inventory)


def _grouped(nodes: Sequence[TopologyNode], shards: int) -> Iterator[TopologyNode]:
    """Take all training workers except the first `shards` of each party out of their planes. Raises InvalidSettings for
    a party whose number of workers is no multiple of the shards.
    """
    sizes = Counter(node.party for node in nodes if node.global_rank is not None)
    for party, size in sizes.items():
        if size % shards:
            what = f"party {party} has {counted(size, 'worker')}, and --shards is {shards}"
            raise InvalidSettings(what, "each party needs a worker for each shard, or a multiple of that")
    for node in nodes:
        if node.global_rank is None:
            yield node
        else:
            yield replace(node, group=sizes[node.party], local=node.local if node.rank < shards else "")


def planes(nodes: Sequence[TopologyNode]) -> dict[str, Plane]:
    """Return all planes by name, in order of first appearance in `nodes`."""
    found = dict.fromkeys(plane for node in nodes for plane in (node.upper, node.local) if plane)
    leaders = {node.upper or node.local: node for node in nodes if node.role.endswith("scheduler")}
    made = {name: Plane(leaders[name]) for name in found}
    for node in nodes:
        if node.local and not node.role.endswith("scheduler"):
            plane = made[node.local]
            (plane.clients if node.role == "worker" else plane.servers).append(node)
        if node.upper and node.role != "global_scheduler":
            plane = made[node.upper]
            (plane.servers if node.role == "global_server" else plane.clients).append(node)
    return made


def links(nodes: Sequence[TopologyNode]) -> tuple[TopologyLink, ...]:
    """Return all links. Members of a plane dial its scheduler, and clients dial its servers. Workers or local servers
    dial each other if the delivery links them.
    """
    found: list[TopologyLink] = []
    for name, plane in planes(nodes).items():
        found += [TopologyLink(node, plane.leader, name) for node in (*plane.servers, *plane.clients)]
        found += [TopologyLink(client, server, name) for client in plane.clients for server in plane.servers]
        pairs = ((node, peer) for node in plane.clients for peer in plane.clients if _is_dialled(peer, node))
        found += [TopologyLink(node, peer, name) for node, peer in pairs]
    return tuple(found)


def reachability_errors(wires: Iterable[TopologyLink]) -> Iterator[HostError]:
    """Yield an error for each host with a process that others have to dial and, by the inventory, cannot."""
    named: set[str] = set()
    for wire in wires:
        dialler, listener = wire.dialler, wire.listener
        if listener.host.name not in named and not listener.host.is_reachable_from(dialler.host):
            named.add(listener.host.name)
            what = f"{listener.name} runs there, and is dialled by {dialler.name} on {dialler.host.name}"
            hint = f"add {dialler.party!r} to reachable_from, or run {listener.role} on another host"
            yield HostError(listener.host.name, "reachable_from", what, hint)


def _is_dialled(peer: TopologyNode, node: TopologyNode) -> bool:
    """Whether a client of a plane dials another one."""
    if node.role == "server":
        return peer.index in node.dials and peer.rank == node.rank
    return peer.rank in node.dials


def group_links(nodes: Sequence[TopologyNode]) -> tuple[TopologyLink, ...]:
    """Return the planned connections of process groups: from the other workers to the worker that leads each group."""
    leaders = {node.party: node for node in nodes if node.leads_group}
    return tuple(
        TopologyLink(node, leaders[node.party], node.party)
        for node in nodes
        if node.group > 1 and not node.leads_group
    )


def _flat(inventory: Inventory) -> Iterator[TopologyNode]:
    central = inventory.central.name
    yield from _scheduler(inventory, central)
    for rank, host in enumerate(hosts_for(inventory, central, "server", inventory.global_servers)):
        yield TopologyNode("server", central, rank, host, local=central)
    global_rank = 0
    for index, party in enumerate(inventory.parties):
        for host, device in _placed(inventory, party):
            yield TopologyNode(
                "worker", party.name, global_rank, host, local=central, index=index, global_rank=global_rank,
                device=device,
            )  # fmt: skip
            global_rank += 1


def _hierarchy(inventory: Inventory) -> Iterator[TopologyNode]:
    central = inventory.central
    spread = inventory.topology == "spread"
    ranks_are_global = inventory.rank_scope == "global"
    everywhere = (spread or inventory.central_server) and central.workers > 0
    alone = everywhere or (ranks_are_global and not central.workers)
    yield from _leader(inventory) if alone else _central_party(inventory)
    if alone and not spread:
        yield from _roots(inventory, central.name, alone=True)
    global_rank = 0
    for index, party in enumerate((*inventory.parties, central) if everywhere else inventory.parties):
        name = party.name
        if spread:
            first = index * inventory.global_servers
            yield from _roots(inventory, name, first, alone=alone)
        yield from _scheduler(inventory, name, index)
        for rank, host in enumerate(hosts_for(inventory, name, "server", inventory.local_servers)):
            yield TopologyNode("server", name, rank, host, local=name, upper=GLOBAL, index=index)
        for rank, (host, device) in enumerate(_placed(inventory, party)):
            master = global_rank == 0 if ranks_are_global else party is central and rank == 0
            yield TopologyNode(
                "worker", name, rank, host, local=name, index=index, global_rank=global_rank, master=master,
                device=device,
            )  # fmt: skip
            global_rank += 1


def _leader(inventory: Inventory) -> Iterator[TopologyNode]:
    central = inventory.central.name
    (host,) = hosts_for(inventory, central, "global_scheduler")
    yield TopologyNode("global_scheduler", central, 0, host, upper=GLOBAL)


def _scheduler(inventory: Inventory, party: str, index: int | None = None) -> Iterator[TopologyNode]:
    (host,) = hosts_for(inventory, party, "scheduler")
    yield TopologyNode("scheduler", party, 0, host, local=party, index=index)


def _central_party(inventory: Inventory) -> Iterator[TopologyNode]:
    central = inventory.central
    yield from _leader(inventory)
    if inventory.topology == "central":
        yield from _roots(inventory, central.name)
    yield from _scheduler(inventory, central.name)
    before = sum(party.workers for party in inventory.parties)
    idle = [(inventory.hosts_of(central.name)[0], "")]
    for rank, (host, device) in enumerate(_placed(inventory, central) or idle):
        global_rank = before + rank if central.workers else None
        yield TopologyNode(
            "worker", central.name, rank, host, local=central.name, global_rank=global_rank,
            master=rank == 0 and inventory.rank_scope == "party", device=device,
        )  # fmt: skip


def _roots(inventory: Inventory, party: str, first: int = 0, *, alone: bool = False) -> Iterator[TopologyNode]:
    """Yield the root servers of one party, ranked from `first`. `alone`: whether the central party's plane has no
    members below them.
    """
    below = "" if alone else inventory.central.name
    hosts = hosts_for(inventory, party, "global_server", inventory.global_servers)
    for rank, host in enumerate(hosts, first):
        yield TopologyNode("global_server", party, rank, host, local=below, upper=GLOBAL)


def _placed(inventory: Inventory, party: Party) -> list[tuple[Host, str]]:
    """Return the host and device of each training worker, host by host."""
    devices = [(host, device) for host in inventory.hosts_of(party.name) for device in host.devices]
    return devices[: party.workers]
