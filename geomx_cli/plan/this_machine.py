"""The built-in inventory: all parties on this machine, over loopback."""

from collections.abc import Mapping, Sequence

from geomx_cli.core import deliveries
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.inventory import CENTRAL, Inventory, topology_fields, validated
from geomx_cli.plan.ports import ports_needed

__all__ = ["party_name", "this_machine"]


def this_machine(options: Mapping[str, Value], ports: Sequence[int], *, one_host: bool = False) -> Inventory:
    """Build an inventory with one planned host for each party on 127.0.0.1, or with `one_host` a single host.

    `options` has the cluster options (parties, workers, ...). An automatic topology is left to with_topology. `ports`
    must have at least `ports_needed` free ports. Raises InvalidSettings if there are too few, or for an invalid number.
    """
    need = ports_needed(options)
    if len(ports) < need:
        raise InvalidSettings(f"{need} free ports are needed and there are {len(ports)}", "give more ports")
    names = [party_name(index) for index in range(int(options["parties"]))]
    workers = {CENTRAL: int(options["central_workers"]), **dict.fromkeys(names, int(options["workers"]))}
    groups = {"local": (CENTRAL, *names)} if one_host else {name: (name,) for name in (CENTRAL, *names)}
    share = need // len(groups)
    hosts = [
        {
            "name": name,
            "parties": parties,
            "address": "127.0.0.1",
            "devices": ("cpu",) * max(workers[party] for party in parties),
            "ports": tuple(ports[index * share : (index + 1) * share]),
        }
        for index, (name, parties) in enumerate(groups.items())
    ]
    shape = ("global_servers", "local_servers", "reduce", "shards")
    fields = topology_fields(options["topology"]) | {name: options[name] for name in shape}
    fields["delivery"] = deliveries.chosen(options)
    fields["delivery_options"] = deliveries.own_options(deliveries.chosen(options), options)
    fields["rank_scope"] = "global" if options["rank_scope"] == "global" else "party"
    parties = [{"name": name, "workers": workers[name]} for name in names]
    central = {"name": CENTRAL, "workers": workers[CENTRAL]}
    return validated({"parties": parties, "central": central, "hosts": hosts, **fields})


def party_name(index: int) -> str:
    """Return A, B, ..., Z, AA, AB, ..."""
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        name = chr(ord("A") + letter) + name
    return name
