"""The checkpoint that a job goes on from: found on the hosts of the job that had it, or fetched from a store to the
hosts of the new one, before any process starts.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.units import some_of
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.actions.streams import ask_agent
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.store.stored_job import StoredJob
from geomx_cli.plan import Plan

__all__ = ["fetch_checkpoint", "newest_checkpoint"]

_FETCHING, _FINDING = 3600.0, 600.0  # seconds; hosts read all files, for their digests


class _Found(msgspec.Struct):
    """The output of agent/checkpoint.py."""

    running: bool
    folder: str
    whole: dict[str, list[str]]
    others: list[str]


class _Fetched(msgspec.Struct):
    """The output of agent/stored.py."""

    folder: str
    damaged: str
    problem: str


def newest_checkpoint(job: KnownJob, note: Callable[[str], object]) -> tuple[int, dict[str, str]]:
    """Return the number of the newest checkpoint that is whole on all hosts of a job, and its folders by host.

    note: gets a sentence about what is skipped. Raises InvalidSettings if there is none, or the job still runs, and
    the hosts' errors.
    """
    hosts = job.open_hosts()

    def ask(name: str) -> tuple[str, _Found]:
        answer = ask_agent(hosts[name], "checkpoints", job.directory_on(name), limit=_FINDING, kind=_Found)
        return name, answer

    try:
        found = dict(everywhere(ask, list(hosts)))
    finally:
        for connector in hosts.values():
            connector.close()
    if running := [name for name, each in found.items() if each.running]:
        what = f"job {job.id} still runs on host {some_of(running, 4)}"
        raise InvalidSettings(what, f"geomx attach {job.id} follows it, and geomx stop {job.id} ends it")
    for name, each in found.items():
        if each.others:
            note(f"host {name}: {each.folder}: skipped what is no whole checkpoint: {some_of(each.others, 4)}")
    placed = {name: {each.name for each in job.plan.on_host(name)} for name in found}
    common = set.intersection(*(
        {int(number) for number, names in each.whole.items() if set(names) == placed[name]}
        for name, each in found.items()
    ))  # fmt: skip
    if not common:
        hint = "a job takes them with --checkpoint-every and --restarts, and a script's with geomx.state"
        raise InvalidSettings(f"job {job.id} has no whole checkpoint", hint)
    newest = max(common)
    return newest, {name: str(Path(each.folder, str(newest))) for name, each in found.items()}


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
            return name, ask_agent(hosts[name], "fetch", *words, limit=_FETCHING, kind=_Fetched)

        found = dict(everywhere(ask, plan.hosts))
        if problems := [f"host {name}: {each.problem}" for name, each in found.items() if each.problem]:
            raise CheckFailed(f"the checkpoint cannot be fetched: {some_of(problems, 4)}", "nothing was started")
        damaged = dict.fromkeys(each.damaged for each in found.values() if each.damaged)
        if not damaged:
            return record.number, {name: each.folder for name, each in found.items()}
        note(f"{stored.place}/{stored.id}/{record.number}: skipped: {some_of(list(damaged), 4)}")
    hint = "nothing was started"
    raise InvalidSettings(f"{stored.place}/{stored.id} has no checkpoint that is undamaged", hint)
