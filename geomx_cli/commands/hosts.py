"""`geomx hosts`: the inventory file."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from geomx_cli.commands._group import SuggestingGroup
from geomx_cli.commands._inventory import DEFAULT_FILE, read_inventory
from geomx_cli.commands._json import json_option, print_json
from geomx_cli.core.units import counted

if TYPE_CHECKING:
    from geomx_cli.inventory.file import InventoryFile
    from geomx_cli.plan.preview import Preview

__all__ = ["hosts"]


@click.group(cls=SuggestingGroup)
def hosts() -> None:
    """The inventory file, which lists the machines of a job."""


@hosts.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path(DEFAULT_FILE), envvar="GEOMX_HOSTS")
@json_option
def check(file: Path, json: bool) -> None:
    """Report all errors in an inventory file, or show what will run where.

    FILE defaults to $GEOMX_HOSTS, else hosts.toml in the current folder. No machine is contacted; see geomx doctor for
    that. The exit status is 3 when there is an error.
    """
    from geomx_cli.plan.preview import preview

    read = read_inventory(file)
    places = preview(read.inventory)
    if json:
        print_json(_object(read, places), indent=2)
    else:
        click.echo("\n".join(_lines(read, places)))


def _object(read: "InventoryFile", places: "tuple[Preview, ...]") -> dict[str, object]:
    inventory = read.inventory
    return {
        "schema_version": 1,
        "file": str(read.path),
        "topology": inventory.topology,
        "central": inventory.central.name,
        "parties": {party.name: party.workers for party in (inventory.central, *inventory.parties)},
        "hosts": [place.to_json() for place in places],
        "job": dict(read.job),
        "notes": list(read.notes),
    }


def _lines(read: "InventoryFile", places: "tuple[Preview, ...]") -> Iterator[str]:
    inventory = read.inventory
    processes = sum(len(place.servers) + len(place.workers) for place in places)
    on = f"on {counted(len(places), 'host')} with --algo fsa"
    yield f"{read.path}: {processes} processes {on}, topology {inventory.topology}"
    yield from read.notes
    for party in (inventory.central, *inventory.parties):
        central = ", central" if party is inventory.central else ""
        trains = f"{counted(party.workers, 'worker')} that train{'s' * (party.workers == 1)}"
        yield f"\nparty {party.name}{central}: {trains if party.workers else 'nobody trains'}"
        for place in places:
            if party.name in place.parties:
                yield from _host(place)
    if read.job:
        yield "\njob: " + ", ".join(f"{name} = {value}" for name, value in read.job.items())


def _host(place: "Preview") -> Iterator[str]:
    yield f"  {place.host}: {place.reached}"
    dialled = f"{place.address}, from other parties at {place.wan_address}" if place.wan_address else place.address
    if any(place.servers.values()):
        yield f"    dialled at {dialled}; ports are the first that are free of {place.candidates}"
    width = max(len(name) for name in (*place.servers, *place.workers, ""))
    for name, port in place.servers.items():
        yield f"    {name:<{width}}  {f'port {port}' if port else 'dialled inside this host only'}"
    for name, device in place.workers.items():
        yield f"    {name:<{width}}  {f'trains on {device}' if device else 'does not train'}"
