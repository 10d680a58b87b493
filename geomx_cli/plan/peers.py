"""Links between workers of a plane, and between local servers of parties, that a delivery uses. Pure functions."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import groupby

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.inventory import Inventory
from geomx_cli.plan.topology_node import TopologyNode

__all__ = ["link_peers"]

_Pairs = set[tuple[int, int]]


def link_peers(nodes: Iterable[TopologyNode], inventory: Inventory) -> tuple[TopologyNode, ...]:
    """Return the nodes with the peers that they dial (`dials`), as the inventory's delivery requests and its hosts
    permit.

    If the process that should dial cannot reach the other, the other dials. If neither can, there is no link. Then
    InvalidSettings is raised if the delivery needs the link.
    """
    found = list(nodes)
    groups = {name: list(group) for name, group in groupby(sorted(found, key=_group), key=_group) if name}
    linked: dict[str, TopologyNode] = {}
    for name, group in groups.items():
        peers = {_place(node): node for node in group}
        of = deliveries.party_peers if name.startswith("parties/") else deliveries.peers
        usual = set(of(inventory.delivery, len(peers), inventory.delivery_options))
        pairs = _reachable(usual, peers)
        if len(pairs) < len(usual) and deliveries.needs_peers(inventory.delivery):
            one, other = (peers[place] for place in min(usual - pairs - {(b, a) for a, b in pairs}))
            what = f"{one.name} and {other.name} exchange by --delivery {inventory.delivery}, and neither can dial"
            raise InvalidSettings(f"{what} the other", f"correct reachable_from of {other.host.name} in the inventory")
        linked |= {node.name: _linked(node, pairs, usual) for node in group}
    return tuple(linked.get(node.name, node) for node in found)


def _group(node: TopologyNode) -> str:
    """The processes among which a delivery may link this one; "" for none."""
    if node.role == "worker" and node.local:
        return f"workers/{node.local}"
    return f"parties/{node.rank}" if node.role == "server" and node.upper else ""


def _place(node: TopologyNode) -> int:
    """Its index in the group."""
    if node.role == "worker":
        return node.rank
    assert node.index is not None
    return node.index


def _reachable(usual: Collection[tuple[int, int]], peers: Mapping[int, TopologyNode]) -> _Pairs:
    found: _Pairs = set()
    for dialler, listener in usual:
        one, other = peers[dialler].host, peers[listener].host
        if other.is_reachable_from(one):
            found.add((dialler, listener))
        elif one.is_reachable_from(other):
            found.add((listener, dialler))
    return found


def _linked(node: TopologyNode, pairs: _Pairs, usual: _Pairs) -> TopologyNode:
    own = _place(node)
    dials = tuple(sorted(listener for dialler, listener in pairs if dialler == own))
    callers = tuple(sorted(dialler for dialler, listener in pairs if listener == own))
    as_usual = {pair for pair in pairs if own in pair} == {pair for pair in usual if own in pair}
    named = (*(f"to:{place}" for place in dials), *(f"from:{place}" for place in callers))
    return replace(node, dials=dials, peers=() if as_usual else named or ("none",))
