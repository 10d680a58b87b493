"""A job as its checkpoints beyond the hosts describe it (agent/stored.py): no file of the job itself is needed."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from geomx_cli.agent.stored import Record, Unusable
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.core.stores import Store, is_url, normal_place
from geomx_cli.core.units import some_of
from geomx_cli.inventory import Inventory, validated
from geomx_cli.plan import Plan

__all__ = ["StoredJob", "description", "find_stored"]


def description(plan: Plan, inventory: Inventory) -> bytes:
    """Return what --resume needs of a job, for the record of its checkpoints. The values of the inventory's `env` stay
    out of it, as they may be secret; their names are there.
    """
    kept = inventory.with_hosts(msgspec.structs.replace(host, env={}) for host in inventory.hosts)
    fields = {
        "script": list(plan.spec.script),
        "options": dict(plan.spec.options),
        "here": set(plan.here) == set(plan.hosts),
        "inventory": msgspec.to_builtins(kept),
        "withheld": sorted({name for host in inventory.hosts for name in host.env}),
    }
    return json.dumps(fields).encode()


@dataclass(frozen=True)
class StoredJob:
    """A job with at least one whole checkpoint in a store.

    place: the folder or URL that holds the job's folder.
    records: of its checkpoints, the newest first.
    script, options, inventory: of the job; the inventory has its machines.
    is_here: the job ran on one machine, on which geomx was started.
    withheld: variables of the inventory whose values are not kept.
    """

    id: str
    place: str
    records: tuple[Record, ...]
    script: tuple[str, ...]
    options: Mapping[str, Value]
    inventory: Inventory
    is_here: bool
    withheld: tuple[str, ...]

    @classmethod
    def of(cls, place: str, records: tuple[Record, ...]) -> "StoredJob":
        """Read the newest record's description. Raises Unusable."""
        fields: Any = records[0].description
        try:
            script, withheld = (tuple(map(str, fields[name])) for name in ("script", "withheld"))
            inventory, options = validated(fields["inventory"]), {**fields["options"]}
        except (KeyError, TypeError, InvalidSettings) as error:
            raise Unusable(f"its description of the job is damaged: {error}") from None
        here = bool(fields.get("here"))
        return cls(records[0].job, place, records, script, options, inventory, here, withheld)

    def check(self, plan: Plan) -> None:
        """Raise InvalidSettings if a plan has other processes than the checkpoints."""
        had, has = set(self.records[0].processes), {process.name for process in plan.processes}
        if had != has:
            names = some_of(sorted(had ^ has), 4)
            hint = "give machines with the same parties and workers"
            raise InvalidSettings(f"the checkpoint of job {self.id} is of other processes: {names}", hint)


def find_stored(place: str, note: Callable[[str], object]) -> StoredJob:
    """Return the job whose checkpoints are at a folder or URL: the value of --checkpoint-to if it has only one job, or
    the job's folder below it. note: gets a sentence about each skipped checkpoint.

    Raises InvalidSettings if there is none, or more than one job, and the store's errors.
    """
    place = normal_place(place)
    store = Store(place)
    names = store.names()
    if any(map(_is_number, names)):
        place, _, job = place.rpartition("/")
        if not place or (is_url(f"{place}/") and place.endswith(("/", ":"))):
            raise InvalidSettings(f"{place}/{job} is no folder of a job", "its name is that of the job")
        store = Store(place)
    else:
        jobs = [name for name in names if any(map(_is_number, store.names(name)))]
        if len(jobs) != 1:
            what = f"has checkpoints of {len(jobs)} jobs: {some_of(jobs, 8)}" if jobs else "has no checkpoint"
            hint = f"choose one: --resume {place}/{jobs[0]}" if jobs else "give what --checkpoint-to was"
            raise InvalidSettings(f"{place} {what}", hint)
        (job,) = jobs
        if others := [name for name in names if name != job]:
            note(f"{place}: skipped what is no job's: {some_of(others, 4)}")
    return _whole(store, place, job, note)


def _whole(store: Store, place: str, job: str, note: Callable[[str], object]) -> StoredJob:
    found: list[Record] = []
    names = store.names(job)
    if others := [name for name in names if not _is_number(name)]:
        note(f"{place}/{job}: skipped what is no checkpoint: {some_of(others, 4)}")
    for number in sorted((int(name) for name in names if _is_number(name)), reverse=True):
        try:
            record = Record.read(store, job, number)
            StoredJob.of(place, (record,))
        except Unusable as error:
            note(f"{place}/{job}/{number}: skipped: {error}")
        else:
            found.append(record)
    if not found:
        hint = "a job uploads the first one after --checkpoint-every, and when it is stopped"
        raise InvalidSettings(f"{place}/{job} has no whole checkpoint", hint)
    return StoredJob.of(place, tuple(found))


def _is_number(name: str) -> bool:
    return name.isascii() and name.isdecimal()
