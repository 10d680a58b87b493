"""The topology of a job: who takes part in which plane, on which host, and who dials whom. Pure functions.

A plane has the name of the party whose scheduler leads it, or is "global".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from geomx_cli.inventory import Host, Inventory
from geomx_cli.ps.config import Role

__all__ = ["GLOBAL", "Link", "Node", "arrange", "file_name", "links"]

GLOBAL = "global"


@dataclass(frozen=True)
class Node:
    """One process. `local` and `upper` name its planes, "" where it has none; `index` is that of its party.

    `rank` counts the processes of one role in its party; global servers, and workers of a flat cluster, count
    in all parties.
    """

    role: Role
    party: str
    rank: int
    host: Host
    local: str = ""
    upper: str = ""
    index: int | None = None
    global_rank: int | None = None
    master: bool = False

    @property
    def name(self) -> str:
        """As in "A/worker:1"."""
        return f"{self.party}/{self.role}:{self.rank}"

    @property
    def listens(self) -> bool:
        """Whether others dial it."""
        return self.role != "worker"

    def serves(self, plane: str) -> bool:
        """Whether it is one of the plane's servers: a local server is a server below and a client above."""
        if plane == GLOBAL:
            return self.role == "global_server"
        return plane == self.local and self.role in ("server", "global_server")

    def leads(self, plane: str) -> bool:
        """Whether it is the plane's scheduler."""
        if plane == GLOBAL:
            return self.role == "global_scheduler"
        return plane == self.local and self.role == "scheduler"

    def uses(self, plane: str) -> bool:
        """Whether it is a client of the plane's servers."""
        if plane == GLOBAL:
            return self.role == "server" and self.upper == GLOBAL
        return plane == self.local and self.role == "worker"


@dataclass(frozen=True)
class Link:
    """`dialler` dials `listener` in `plane`."""

    dialler: Node
    listener: Node
    plane: str

    @property
    def wide_area(self) -> bool:
        """Whether it joins two parties."""
        return self.dialler.party != self.listener.party

    @property
    def near(self) -> bool:
        """Whether both stand on one planned host."""
        return self.dialler.host.name == self.listener.host.name


def file_name(process: str) -> str:
    """A process's name as part of a path: "A/worker:1" is "A-worker-1"."""
    return process.replace("/", "-").replace(":", "-")


def arrange(inventory: Inventory) -> tuple[Node, ...]:
    """Every process: the central party first, then the participating ones in order.

    In topology "spread" a central party that trains is a participating one, the last: it has a local server of its
    own, and its first worker is the master.
    """
    return tuple(_flat(inventory) if inventory.topology == "flat" else _hierarchy(inventory))


def links(nodes: Sequence[Node]) -> tuple[Link, ...]:
    """Who dials whom: the members of each plane its scheduler, and its clients its servers."""
    planes = dict.fromkeys(plane for node in nodes for plane in (node.upper, node.local) if plane)
    found: list[Link] = []
    for plane in planes:
        leader = next(node for node in nodes if node.leads(plane))
        servers = [node for node in nodes if node.serves(plane)]
        clients = [node for node in nodes if node.uses(plane)]
        found += [Link(node, leader, plane) for node in (*servers, *clients)]
        found += [Link(client, server, plane) for client in clients for server in servers]
    return tuple(found)


def _flat(inventory: Inventory) -> Iterator[Node]:
    central = inventory.central.name
    hosts = inventory.hosts_of(central)
    yield Node("scheduler", central, 0, hosts[0], local=central)
    for rank in range(inventory.global_servers):
        yield Node("server", central, rank, hosts[rank % len(hosts)], local=central)
    global_rank = 0
    for index, party in enumerate(inventory.parties):
        for host in _placed(inventory.hosts_of(party.name), party.workers):
            yield Node(
                "worker", party.name, global_rank, host, local=central, index=index, global_rank=global_rank
            )
            global_rank += 1


def _hierarchy(inventory: Inventory) -> Iterator[Node]:
    central = inventory.central
    everywhere = inventory.topology == "spread" and central.workers > 0
    yield from _leader(inventory) if everywhere else _central(inventory)
    global_rank = 0
    for index, party in enumerate((*inventory.parties, central) if everywhere else inventory.parties):
        name, hosts = party.name, inventory.hosts_of(party.name)
        if inventory.topology == "spread":
            first = index * inventory.global_servers
            yield from _roots(inventory, name, range(first, first + inventory.global_servers), alone=everywhere)
        yield Node("scheduler", name, 0, hosts[0], local=name, index=index)
        for rank in range(inventory.local_servers):
            yield Node("server", name, rank, hosts[rank % len(hosts)], local=name, upper=GLOBAL, index=index)
        for rank, host in enumerate(_placed(hosts, party.workers)):
            yield Node(
                "worker", name, rank, host, local=name, index=index, global_rank=global_rank + rank,
                master=party is central and rank == 0,
            )  # fmt: skip
        global_rank += party.workers


def _leader(inventory: Inventory) -> Iterator[Node]:
    central = inventory.central.name
    yield Node("global_scheduler", central, 0, inventory.hosts_of(central)[0], upper=GLOBAL)


def _central(inventory: Inventory) -> Iterator[Node]:
    central = inventory.central
    hosts = inventory.hosts_of(central.name)
    yield from _leader(inventory)
    if inventory.topology == "central":
        yield from _roots(inventory, central.name, range(inventory.global_servers))
    yield Node("scheduler", central.name, 0, hosts[0], local=central.name)
    before = sum(party.workers for party in inventory.parties)
    for rank, host in enumerate(_placed(hosts, max(1, central.workers))):
        global_rank = before + rank if central.workers else None
        yield Node(
            "worker", central.name, rank, host, local=central.name, global_rank=global_rank, master=rank == 0
        )


def _roots(inventory: Inventory, party: str, ranks: range, *, alone: bool = False) -> Iterator[Node]:
    """Roots of one party; `alone`: nobody of the central party's plane stands below them."""
    hosts = inventory.hosts_of(party)
    below = "" if alone else inventory.central.name
    for place, rank in enumerate(ranks):
        host = hosts[place % len(hosts)]
        yield Node("global_server", party, rank, host, local=below, upper=GLOBAL)


def _placed(hosts: Sequence[Host], workers: int) -> list[Host]:
    """The host of each worker: in blocks, in proportion to the devices of the hosts."""
    slots = [host for host in hosts for _ in host.devices]
    if workers <= len(slots):
        return slots[:workers]
    return [slots[rank * len(slots) // workers] for rank in range(workers)]
