"""The built-in inventory inside an allocation of a batch system: its nodes, as one party or several."""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.core.units import counted
from geomx_cli.hosts.allocation import Present
from geomx_cli.inventory import CENTRAL, Inventory, topology_fields, validated
from geomx_cli.inventory.keys import DEFAULT_PORTS
from geomx_cli.inventory.values import ports
from geomx_cli.plan.this_machine import party_name

__all__ = ["described", "this_allocation"]

_REQUEST = "allocation"


def this_allocation(present: Present, options: Mapping[str, Value], written: Mapping[str, Value]) -> Inventory:
    """Build an inventory of the nodes of an allocation.

    `written`: the cluster options that the user has given. Without --parties, the nodes are one party: they are one
    cluster, whose network is fast. Otherwise each party has neighbours in the list of nodes, which batch systems sort
    by place. Each device of a node has a worker, and --workers limits or, without GPUs, sets their number in each
    party. The first node also runs the central party. Raises InvalidSettings if there are too few nodes or GPUs.
    """
    nodes = list(present.devices)
    parties = int(written.get("parties", 1))
    if parties > len(nodes):
        what = f"--parties {parties}, and {present.title} has {counted(len(nodes), 'node')}"
        raise InvalidSettings(what, "ask for more nodes, or write --local for parties on one machine")
    members = {party_name(index): _share(nodes, index, parties) for index in range(parties)}
    devices = {
        node: given for name, own in members.items() for node, given in _devices(name, own, present, written).items()
    }
    central = int(written.get("central_workers", 0))
    hosts = [_host(CENTRAL, CENTRAL, nodes[0], ("cpu",) * central, present.threads)]
    hosts += [
        _host(node if node != CENTRAL else f"{node}-node", name, node, devices[node], present.threads)
        for name, own in members.items()
        for node in own
    ]
    fields = topology_fields(options["topology"])
    fields |= {name: options[name] for name in ("global_servers", "local_servers", "reduce", "shards")}
    fields["delivery"] = deliveries.chosen(options)
    fields["delivery_options"] = deliveries.own_options(deliveries.chosen(options), options)
    fields["rank_scope"] = "global" if options["rank_scope"] == "global" else "party"
    counts = {name: sum(len(devices[node]) for node in own) for name, own in members.items()}
    return validated(
        {
            **fields,
            "parties": [{"name": name, "workers": count} for name, count in counts.items()],
            "central": {"name": CENTRAL, "workers": central},
            "hosts": hosts,
            "requests": [{"name": _REQUEST, "allocator": present.allocator, "job": present.job}],
        }
    )


def described(present: Present, inventory: Inventory) -> str:
    """Return a line about the nodes and parties."""
    parties = [
        f"{party.name} has {counted(len(inventory.hosts_of(party.name)), 'node')} and "
        f"{counted(party.workers, 'worker')}"
        for party in inventory.parties
    ]
    nodes = f"{counted(len(present.devices), 'node')} ({present.nodes})"
    return f"{present.title}: {nodes}; party {', '.join(parties)}; --parties and --workers change this"


def _share(nodes: Sequence[str], index: int, parties: int) -> Sequence[str]:
    return nodes[len(nodes) * index // parties : len(nodes) * (index + 1) // parties]


def _devices(
    party: str, nodes: Sequence[str], present: Present, written: Mapping[str, Value]
) -> dict[str, Sequence[str]]:
    """Return the devices of a party's nodes."""
    there = {node: present.devices[node] for node in nodes}
    if "workers" not in written:
        return there
    workers = int(written["workers"])
    gpus = sum(device != "cpu" for each in there.values() for device in each)
    if gpus and workers > gpus:
        what = f"--workers {workers}, and the nodes of party {party} have {counted(gpus, 'GPU')}"
        raise InvalidSettings(what, "each worker has a GPU: ask for more, or take fewer workers")
    counts = dict.fromkeys(nodes, 0)
    for node in islice(cycle(nodes), workers):
        counts[node] += 1
    return {node: there[node][:count] if gpus else ("cpu",) * count for node, count in counts.items()}


def _host(name: str, party: str, node: str, devices: Sequence[str], threads: int) -> dict[str, Any]:
    return {
        "name": name,
        "parties": (party,),
        "access": {"kind": "requested", "address": node, "shares_files": True},
        "request": _REQUEST,
        "devices": tuple(devices),
        "threads": threads,
        "ports": ports(DEFAULT_PORTS, DEFAULT_PORTS),
    }
