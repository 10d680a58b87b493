"""Cross-host validation of an inventory file, and construction of the Inventory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from geomx_cli.contract.addresses import is_loopback
from geomx_cli.core import plugins
from geomx_cli.core.option import nearest
from geomx_cli.inventory import HostError, Inventory, topology_fields, validated, values
from geomx_cli.inventory.keys import DEFAULT_PORTS, HOST_KEYS, SSH_KEYS, Mistakes

__all__ = ["Check", "build", "cross_check"]

Check = Callable[[Inventory], Iterable[HostError]]
Table = Mapping[str, Any]
_SSH = {key.name: key.name.removeprefix("ssh_") for key in (*HOST_KEYS, *SSH_KEYS) if key.group in ("ssh", "client")}
_LINK = {"from": "source", "to": "target"}
_PLAIN = [key.name for key in HOST_KEYS if key.group not in ("ssh", "batch") and key.name not in ("party", "ports")]
_REQUEST = {"partition", "account", "constraint", "gres", "time", "container", "python"}


def cross_check(top: Table, hosts: Sequence[Table], links: Sequence[Table], mistakes: Mistakes) -> None:
    """Add the errors among the hosts and links. Checks that depend on invalid keys are skipped."""
    _names(hosts, mistakes)
    _addresses(hosts, mistakes)
    for index, host in enumerate(hosts):
        if "CUDA_VISIBLE_DEVICES" in host["env"] and any(device != "cpu" for device in host.get("devices", ())):
            what = "CUDA_VISIBLE_DEVICES is set for each worker, by its entry in devices"
            mistakes.add(("host", index, "env", "CUDA_VISIBLE_DEVICES"), what, "leave it out of env")
    if hosts and mistakes.keys.isdisjoint({"host", "party", "central"}):
        _known_central(top, hosts, mistakes)
    if hosts and mistakes.keys.isdisjoint({"host", "party", "reachable_from"}):
        _reachable_from(hosts, mistakes)
    if hosts and mistakes.keys.isdisjoint({"host", "party", "central", "devices", "topology"}):
        _parties(top, hosts, mistakes)
    if hosts and mistakes.keys.isdisjoint({"host", "party"}):
        _links(hosts, links, mistakes)


def build(
    top: Table, hosts: Sequence[Table], links: Sequence[Table], mistakes: Mistakes, check: Check
) -> tuple[Inventory, tuple[str, ...]]:
    """Build the inventory; also return notes on defaults chosen for the user. Raises InvalidSettings for errors of
    `check`.
    """
    central, notes = _central(top, hosts)
    requested = [host for host in hosts if host.get("allocator")]
    notes = [*notes, *(f"{host['allocator']} gives {_machines(host)} at launch" for host in requested)]
    fields = {name: value for name, value in top.items() if name not in ("central", "topology")}
    workers = _workers(hosts)
    notes = [*notes, *_alike(workers)]
    inventory = validated(
        {
            **fields,
            **topology_fields(top.get("topology", "auto")),
            "central": {"name": central, "workers": workers[central]},
            "parties": [{"name": name, "workers": count} for name, count in workers.items() if name != central],
            "hosts": [each for host in hosts for each in _hosts(host)],
            "requests": [_request(host) for host in requested],
            "links": [{_LINK.get(name, name): value for name, value in link.items()} for link in links],
        }
    )
    places = {each["name"]: index for index, host in enumerate(hosts) for each in _hosts(host)}
    for error in check(inventory):
        mistakes.add_inherited(places[error.host], error.key, error.message, error.hint)
    mistakes.raise_if_any()
    return inventory, tuple(notes)


def _hosts(table: Table) -> list[dict[str, Any]]:
    """Return the host of an entry, or those for which an allocator gives machines."""
    if not table.get("allocator"):
        return [_host(table, _access(table))]
    several = table.get("nodes", 1) > 1
    names = [f"{table['name']}-{index + 1}" if several else table["name"] for index in range(table.get("nodes", 1))]
    own = getattr(plugins.find("allocator", table["allocator"]), "shares_files", False)
    known = {"kind": "requested", "shares_files": own and _login(table)["kind"] == "local"}
    return [{**_host({**table, "name": name}, {**known, "address": name}), "request": table["name"]} for name in names]


def _access(table: Table) -> dict[str, Any]:
    ssh = {field: table[name] for name, field in _SSH.items() if name in table and name not in ("local", "ssh")}
    address = table.get("ssh", table["name"])
    return {"kind": "local"} if table.get("local") else {"kind": "ssh", "address": address, **ssh}


def _login(table: Table) -> dict[str, Any]:
    return _access({**table, "ssh": table["login"]}) if "login" in table else {"kind": "local"}


def _request(table: Table) -> dict[str, Any]:
    known = {name: table[name] for name in _REQUEST if name in table}
    arguments = {"arguments": table["sbatch"]} if "sbatch" in table else {}
    return {"name": table["name"], "allocator": table["allocator"], "login": _login(table), **known, **arguments}


def _machines(table: Table) -> str:
    count = table.get("nodes", 1)
    return f"{table['name']} its machine" if count == 1 else f"{table['name']} its {count} machines"


def _host(table: Table, access: Table) -> dict[str, Any]:
    return {
        **{name: table[name] for name in _PLAIN if name in table},
        "parties": (table["party"],),
        "access": access,
        "ports": table.get("ports") or values.ports(DEFAULT_PORTS, example=DEFAULT_PORTS),
    }


def _workers(hosts: Sequence[Table]) -> dict[str, int]:
    """Count the devices of each party, in the order of the file."""
    found: dict[str, int] = {}
    for host in hosts:
        found[host["party"]] = found.get(host["party"], 0) + len(host.get("devices", ())) * host.get("nodes", 1)
    return found


def _central(top: Table, hosts: Sequence[Table]) -> tuple[str, list[str]]:
    """Return the central party, and a note on the choice if it is not configured."""
    workers = _workers(hosts)
    if "central" in top:
        return top["central"], []
    for name, count in workers.items():
        if not count:
            return name, [f"the central party is {name}, which has no devices"]
    first = next(iter(workers))
    return first, [f"the central party is {first}, the first; its workers train like the others"]


def _alike(parties: Iterable[str]) -> Iterator[str]:
    """Yield a warning for each party whose name differs from an earlier one only in case."""
    seen: dict[str, str] = {}
    for name in parties:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            yield f"warning: parties {other} and {name} differ only in case; if they are one, write one name"


def _names(hosts: Sequence[Table], mistakes: Mistakes) -> None:
    seen = set()
    for index, host in enumerate(hosts):
        name = host.get("name")
        if name in seen:
            hint = "give each host a name of its own; one machine may have several"
            mistakes.add(("host", index, "name"), f"a host called {name} is there already", hint)
        if name is not None:
            seen.add(name)
        if host.get("party") == "global":
            what = "a party cannot be called global, as the plane between parties is"
            mistakes.add(("host", index, "party"), what, "choose another name")


def _addresses(hosts: Sequence[Table], mistakes: Mistakes) -> None:
    remote = [index for index, host in enumerate(hosts) if not host.get("local") or host.get("allocator")]
    dialled = [(index, key, host[key]) for index, host in enumerate(hosts) for key in _dialled(host)]
    far = [address for _, _, address in dialled if not is_loopback(address)]
    for index, key, address in dialled:
        if far and is_loopback(address):
            where = ("host", index, key)
            mistakes.add(where, f"{key}: nobody else can dial {address}", f"write one that reaches it from {far[0]}")
    for index, host in enumerate(hosts):
        given = {"address", "interface", "allocator"} & host.keys()
        if host.get("local") and remote and not given:
            what = "this is the machine where geomx is typed, and the others do not know how to dial it"
            mistakes.add(("host", index), what, 'write address = "..." or interface = "..." under it')


def _dialled(host: Table) -> Iterator[str]:
    """Yield the keys that define the addresses that other hosts dial."""
    for key in ("address", "wan_address"):
        if key in host:
            yield key
    if "ssh" in host and not {"address", "interface", "local", "allocator"} & host.keys():
        yield "ssh"


def _known_central(top: Table, hosts: Sequence[Table], mistakes: Mistakes) -> None:
    parties = [host["party"] for host in hosts]
    if "central" in top and top["central"] not in parties:
        what = f"no host belongs to the central party {top['central']!r}"
        mistakes.add(("central",), what, nearest(top["central"], list(dict.fromkeys(parties))))


def _reachable_from(hosts: Sequence[Table], mistakes: Mistakes) -> None:
    parties = list(dict.fromkeys(host["party"] for host in hosts))
    for index, host in enumerate(hosts):
        for name in host.get("reachable_from", ()):
            if name not in parties:
                where = ("host", index, "reachable_from")
                mistakes.add(where, f"no host belongs to party {name!r}", nearest(name, parties))


def _parties(top: Table, hosts: Sequence[Table], mistakes: Mistakes) -> None:
    workers = _workers(hosts)
    place = {name: next(index for index, host in enumerate(hosts) if host["party"] == name) for name in workers}
    central, _ = _central(top, hosts)
    if len(workers) == 1:
        what = f"all hosts belong to {central}, and a job needs another party that trains"
        mistakes.add(("host", 0), what, 'give some another party = "..."')
    for name, count in workers.items():
        if name != central and not count:
            what = f"party {name} has no devices, and only the central party, {central}, can be without"
            mistakes.add(("host", place[name]), what, 'write devices = ["cpu"] under one of its hosts')
    if top.get("topology") == "flat":
        _flat(top, hosts, central, mistakes)


def _flat(top: Table, hosts: Sequence[Table], central: str, mistakes: Mistakes) -> None:
    if top.get("local_servers", 1) > 1:
        what = "topology flat has no local servers"
        mistakes.add(("local_servers",), what, "leave local_servers out; share the model with global_servers")
    for index, host in enumerate(hosts):
        if host["party"] == central and host.get("devices"):
            what = f"topology flat has no workers in the central party, {central}"
            mistakes.add(("host", index, "devices"), what, "leave devices out there, or take another topology")


def _links(hosts: Sequence[Table], links: Sequence[Table], mistakes: Mistakes) -> None:
    parties = list(_workers(hosts))
    seen: set[tuple[str, str]] = set()
    for index, link in enumerate(links):
        where = ("link", index)
        for key in _LINK:
            if key not in link and key not in mistakes.keys:
                mistakes.add(where, f"this link has no {key}", f'write {key} = "{parties[0]}" under it')
            elif key in link and link[key] not in parties:
                mistakes.add((*where, key), f"no host belongs to party {link[key]!r}", nearest(link[key], parties))
        pair = link.get("from", ""), link.get("to", "")
        if all(pair) and pair[0] == pair[1]:
            mistakes.add(where, f"this link leads from {pair[0]} to itself", "links lead to another party")
        elif all(pair) and pair in seen:
            what = f"the link from {pair[0]} to {pair[1]} is there already"
            mistakes.add(where, what, "write one for each direction")
        seen.add(pair)
        if not {"rate", "delay"} & link.keys() and mistakes.keys.isdisjoint({"rate", "delay"}):
            hint = 'write rate = "50mbit" or delay = "40ms" under it'
            mistakes.add(where, "this link has neither rate nor delay", hint)
