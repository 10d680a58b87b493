"""`geomx hosts`: the inventory file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._command import SuggestingGroup, json_option, print_json
from geomx_cli.commands._inventory import (
    DEFAULT_FILE,
    hostfile_option,
    inventory_path,
    read_inventory,
    with_job_options,
)
from geomx_cli.commands._options import add_options
from geomx_cli.core.options import Value
from geomx_cli.core.plugins import table
from geomx_cli.core.units import counted

if TYPE_CHECKING:
    from geomx_cli.inventory.file import InventoryFile
    from geomx_cli.plan.automatic_topology import Preview

__all__ = ["hosts"]

_SHAPING = {option.name: option.default for option in table() if option.name in ("delivery", "reduce", "shards", "wan")}


@click.group(cls=SuggestingGroup)
def hosts() -> None:
    """The inventory file, which lists the machines of a job."""


@add_options(option for option in table() if option.name == "algo")
@hosts.command()
@click.option(
    "--hosts",
    type=click.Path(path_type=Path),
    default=Path(DEFAULT_FILE),
    envvar="GEOMX_HOSTS",
    show_envvar=True,
    help=f"The inventory file; {DEFAULT_FILE} of this folder by default.",
)
@hostfile_option
@json_option
def check(hosts: Path, json: bool, algo: str) -> None:
    """Report all errors in an inventory file, or show the host and ports of each process.

    The options of the job are in the file's [job] table; --algo overrides the algorithm. This
    command contacts no machine; use geomx doctor for that. If there is an error, the exit code is 3.
    """
    from geomx_cli.plan.automatic_topology import emulated_network, preview

    read = read_inventory(inventory_path(hosts, local=False) or hosts)
    inventory, values = with_job_options(read, {"algo": algo, **_SHAPING})
    read = replace(read, inventory=inventory)
    places = preview(inventory)
    if json:
        print_json(_object(read, str(values["algo"]), places), indent=2)
    else:
        network = emulated_network(str(values["wan"]), (link.text for link in inventory.links))
        click.echo("\n".join(_lines(read, str(values["algo"]), places, network)))


def _object(read: "InventoryFile", algo: str, places: "tuple[Preview, ...]") -> dict[str, object]:
    inventory = read.inventory
    return {
        "schema_version": 1,
        "file": str(read.path),
        "algo": algo,
        "topology": inventory.topology,
        "topology_reason": inventory.topology_reason,
        "central": inventory.central.name,
        "parties": {party.name: party.workers for party in (inventory.central, *inventory.parties)},
        "hosts": [place.to_json() for place in places],
        "job": dict(read.job),
        "notes": list(read.notes),
    }


def _lines(
    read: "InventoryFile", algo: str, places: "tuple[Preview, ...]", network: str
) -> Iterator[str]:
    from geomx_cli.plan.automatic_topology import topology_line

    inventory = read.inventory
    processes = sum(len(place.servers) + len(place.workers) for place in places)
    on = f"on {counted(len(places), 'host')} with --algo {algo}"
    yield f"{read.path}: {processes} processes {on}, {topology_line(inventory)}"
    if network:
        yield network
    yield from read.notes
    for party in (inventory.central, *inventory.parties):
        central = ", central" if party is inventory.central else ""
        trains = f"{counted(party.workers, 'worker')} that train{'s' * (party.workers == 1)}"
        yield f"\nparty {party.name}{central}: {trains if party.workers else 'nobody trains'}"
        for place in places:
            if party.name in place.parties:
                yield from _host(place)
    if read.job:
        yield "\njob: " + ", ".join(f"{name} = {_written(name, value)}" for name, value in read.job.items())


def _written(name: str, value: Value) -> Value:
    """Return an option's value, or the word for it."""
    option = next(option for option in table() if option.name == name)
    return option.word if option.word and value == option.default else value


def _host(place: "Preview") -> Iterator[str]:
    yield f"  {place.host}: {place.reached}"
    dialled = f"{place.address}, from other parties at {place.wan_address}" if place.wan_address else place.address
    if any((*place.servers.values(), *place.groups.values())):
        yield f"    dialled at {dialled}; ports are the first that are free of {place.candidates}"
    width = max(len(name) for name in (*place.servers, *place.workers, ""))
    for name, port in place.servers.items():
        reserved = f", identified by port {place.reserved[name]}" if name in place.reserved else ""
        yield f"    {name:<{width}}  {f'port {port}' if port else f'dialled inside this host only{reserved}'}"
    for name, device in place.workers.items():
        what = f"trains on {device}, global rank {place.ranks[name]}" if device else "does not train"
        what += f", port {place.groups[name]} for its party's workers" if name in place.groups else ""
        yield f"    {name:<{width}}  {what}"
