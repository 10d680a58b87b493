"""Remove ended jobs: their directories on the hosts that ran them, then on this machine."""

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from geomx_cli.agent.prune import ENTRIES, remove, size_of
from geomx_cli.core.errors import GeomxError, HostUnreachable, InvalidSettings
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.core.units import some_of
from geomx_cli.core.untrusted import first_line
from geomx_cli.hosts import Connector, closing, everywhere
from geomx_cli.jobs.actions.streams import ask_agent
from geomx_cli.jobs.store.job_state import OWN, JobState
from geomx_cli.jobs.store.registry import KnownJob, all_jobs, find
from geomx_cli.jobs.view.job_view import JobView

__all__ = ["PRUNE_VERSION", "Pruned", "Pruner", "select"]

PRUNE_VERSION = 1
_SHOWN = 500  # characters of a problem
_NAMED = 3  # other files
_LIMIT = 600.0  # seconds for the largest directory on a slow disk


class _Answer(msgspec.Struct):
    """The output of agent/prune.py."""

    bytes: int
    place: str
    left: str
    running: int = 0


@dataclass
class Pruned:
    """An ended job. ended: Unix seconds. sizes: bytes by host, None if unknown; what hosts share counts at the first.
    own: bytes on this machine besides. problems: why it could not be removed as a whole.
    """

    job: KnownJob
    ended: float
    sizes: dict[str, int | None] = field(default_factory=dict)
    own: int = 0
    removed: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The known bytes of all hosts and of this machine."""
        return self.own + sum(size or 0 for size in self.sizes.values())

    @property
    def hosts(self) -> int | None:
        """How many hosts the job has; None if its plan is damaged."""
        try:
            return len(self.job.plan.hosts)
        except GeomxError:
            return None

    def to_json(self) -> dict[str, Any]:
        """The job as JSON data."""
        return {
            "job": self.job.id, "ended": self.ended, "bytes": self.bytes, "hosts": self.sizes, "removed": self.removed,
            "problems": self.problems,
        }  # fmt: skip


def select(jobs: Collection[Pruned], *, older_than: float, keep: int) -> list[Pruned]:
    """Return the jobs that ended at least `older_than` seconds ago, except the `keep` newest; the newest first."""
    newest_first = sorted(jobs, key=lambda one: (one.ended, one.job.id), reverse=True)
    now = time.time()
    return [one for one in newest_first[keep:] if now - one.ended >= older_than]


class Pruner:
    """Finds, measures and removes ended jobs; connections to hosts are shared by all jobs. Close it at the end.

    problems: jobs whose state cannot be known now; they are left alone, as are running ones. With `dry_run` nothing is
    recorded of a detached job that has ended. With `forget_unreachable` hosts that do not answer keep their part of a
    job, of which nothing is known afterwards.
    """

    def __init__(self, *, dry_run: bool = False, forget_unreachable: bool = False) -> None:
        self._dry_run = dry_run
        self._forgets = forget_unreachable
        self.problems: list[str] = []
        self._connectors: dict[str, Connector] = {}
        self._lost: dict[Connector, HostUnreachable] = {}

    def close(self) -> None:
        """Disconnect from all hosts."""
        with closing(self._connectors):
            pass

    def ended(self, names: Collection[str] = ()) -> list[Pruned]:
        """Return the jobs that have ended; of detached jobs their hosts know. `names`: only these, as in `find`, whose
        errors it raises, and InvalidSettings for one that runs.
        """
        found = []
        named = list({job.id: job for job in map(find, names)}.values())
        for job in named or all_jobs():
            try:
                when = self._ended(job)
            except GeomxError as error:
                self.problems.append(f"job {job.id}: {first_line(error)}")
                continue
            if when is not None:
                found.append(Pruned(job, when))
            elif named:
                raise InvalidSettings(f"job {job.id} has not ended", f"geomx stop {job.id} ends it")
        return found

    def measure(self, one: Pruned) -> None:
        """Fill in the sizes of a job; hosts that do not answer are among its problems."""
        one.own = size_of(one.job.directory / name for name in OWN)
        places: set[str] = set()
        for host, answer in self._everywhere(one, "--dry-run").items():
            one.sizes[host] = None if answer is None else 0 if answer.place in places else max(0, answer.bytes)
            if answer is not None:
                places.add(answer.place)

    def remove(self, one: Pruned) -> None:
        """Remove a job, from this machine last; what could not be removed is among its problems, and stays known.

        While any host has processes of it, nothing is removed; what hosts may share stays until all of them answer. A
        job whose plan is damaged is only removed from this machine.
        """
        try:
            self._remove(one)
        except (GeomxError, OSError) as error:
            one.problems.append(first_line(error))

    def _remove(self, one: Pruned) -> None:
        one.problems.clear()
        state = JobState.read(one.job.directory)
        # a full disk may have kept that it is over from being saved; then the hosts know
        if state is not None and not state.over and state.followed:
            one.problems.append("it runs again")
            return
        asked = self._everywhere(one, "--dry-run")
        running = [host for host, answer in asked.items() if answer is not None and answer.running]
        if running:
            one.problems += [f"host {host}: processes of it still run there" for host in running]
            return
        if self._forgets or not asked:
            one.problems.clear()
        silent = [host for host, answer in asked.items() if answer is None]
        withheld: set[str] = set() if self._forgets else {one.job.plan.job_dirs[host] for host in silent}
        idle = [host for host in asked if host not in silent and one.job.plan.job_dirs[host] not in withheld]
        for host, answer in (self._everywhere(one, among=idle) if idle else {}).items():
            if answer is not None and (answer.left or answer.running):
                one.problems.append(f"host {host}: {answer.left[:_SHOWN] or 'the job runs there again'}")
        if one.problems:
            return
        entry, directory = jobs_folder() / one.job.id, one.job.directory
        left = remove(directory, ENTRIES) or _other_files(directory) or remove(directory, OWN)
        if left:
            one.problems.append(left)
            return
        if entry.is_symlink():
            entry.unlink(missing_ok=True)
        one.removed = True

    def _ended(self, job: KnownJob) -> float | None:
        """When a job ended; None if it runs. Raises InvalidSettings if that cannot be known."""
        state = JobState.read(job.directory)
        if state is None or not state.over:
            if state is not None and state.followed:
                return None
            job_view = JobView.of(job, self._hosts(job))
            unknown = [one for one in job_view.unreachable if not self._forgets or one.agent == "elsewhere"]
            if unknown:
                texts = [f"host {one.host}: {one.problem}" for one in unknown]
                raise InvalidSettings(f"whether it runs is unknown, it is kept for later: {'; '.join(texts)[:_SHOWN]}")
            if not all(one.over for one in job_view.hosts.values() if one.reachable) or job_view.begins:
                return None
            if self._dry_run:
                return job.started + job_view.seconds()
            job_view.conclusion()
            state = JobState.read(job.directory)
        return job.started if state is None else state.ended or state.started

    def _hosts(self, job: KnownJob) -> dict[str, Connector]:
        """Return a job's hosts; a machine that an earlier job had too is connected to once."""
        found = {}
        for name, connector in job.open_hosts().items():
            key = f"{name} {job.inventory.host(name).access!r} {connector.python}"
            found[name] = self._connectors.setdefault(key, connector)
        return found

    def _everywhere(
        self, one: Pruned, *arguments: str, among: Collection[str] | None = None
    ) -> Mapping[str, _Answer | None]:
        """Run agent/prune.py on all hosts of a job, or on those in `among`; planned hosts of this machine answer
        together, by the name of the first. Adds problems. There is no answer if the job's plan is damaged.
        """
        try:
            groups = [group for group in self._groups(one.job) if among is None or group[0].name in among]
        except InvalidSettings as error:
            one.problems.append(first_line(error))
            return {}

        def ask(group: tuple[Connector, list[str]]) -> tuple[str, _Answer | None]:
            connector, directories = group
            try:
                if connector in self._lost:  # another job has waited for it
                    raise self._lost[connector]
                answer = ask_agent(connector, "prune", *directories, *arguments, limit=_LIMIT, kind=_Answer)
                return connector.name, answer
            except (GeomxError, OSError) as error:
                if isinstance(error, HostUnreachable):
                    self._lost[connector] = error
                one.problems.append(f"host {connector.name}: {first_line(error, connector.name)}")
                return connector.name, None

        return dict(everywhere(ask, groups))

    def _groups(self, job: KnownJob) -> Iterator[tuple[Connector, list[str]]]:
        plan = job.plan
        together: dict[str, tuple[Connector, list[str]]] = {}
        for name, connector in self._hosts(job).items():
            machine = plan.job_dirs[name] if name in plan.here else f"{name}:"
            together.setdefault(machine, (connector, []))[1].append(job.directory_on(name))
        yield from together.values()


def _other_files(directory: Path) -> str:
    """Return which entries of a directory are not the job's, in words; "" if all are."""
    found = directory.iterdir() if directory.is_dir() else ()
    others = sorted(path.name for path in found if path.name not in OWN)
    return f"move other files out of {directory}: {some_of(others, _NAMED)[:_SHOWN]}" if others else ""
