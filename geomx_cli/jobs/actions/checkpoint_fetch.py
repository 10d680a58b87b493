"""Fetches a stored checkpoint to the hosts of the job that goes on from it, before any process starts."""

from collections.abc import Callable, Mapping

import msgspec

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.units import some_of
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.actions.streams import ask_agent
from geomx_cli.jobs.store.stored_job import StoredJob
from geomx_cli.plan import Plan

__all__ = ["fetch_checkpoint"]

_LIMIT = 3600.0  # seconds


class _Fetched(msgspec.Struct):
    """The output of agent/stored.py."""

    folder: str
    damaged: str
    problem: str


def fetch_checkpoint(
    stored: StoredJob, plan: Plan, hosts: Mapping[str, Connector], note: Callable[[str], object]
) -> tuple[int, dict[str, str]]:
    """Fetch the newest checkpoint whose digests are right on all hosts. Return its number, and its folders by host.

    note: gets a sentence about each skipped checkpoint. Raises InvalidSettings if no checkpoint is left, CheckFailed if
    a host cannot fetch it, and the hosts' errors.
    """
    for record in stored.records:

        def ask(name: str, number: int = record.number) -> tuple[str, _Fetched]:
            place = f"{plan.job_dirs[name]}/hosts/{name}"
            words = (place, stored.place, stored.id, str(number), *(process.name for process in plan.on_host(name)))
            return name, ask_agent(hosts[name], "fetch", *words, limit=_LIMIT, kind=_Fetched)

        found = dict(everywhere(ask, plan.hosts))
        if problems := [f"host {name}: {each.problem}" for name, each in found.items() if each.problem]:
            raise CheckFailed(f"the checkpoint cannot be fetched: {some_of(problems, 4)}", "nothing was started")
        damaged = dict.fromkeys(each.damaged for each in found.values() if each.damaged)
        if not damaged:
            return record.number, {name: each.folder for name, each in found.items()}
        note(f"{stored.place}/{stored.id}/{record.number}: skipped: {some_of(list(damaged), 4)}")
    hint = "nothing was started"
    raise InvalidSettings(f"{stored.place}/{stored.id} has no checkpoint that is undamaged", hint)
