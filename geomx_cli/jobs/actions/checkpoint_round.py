"""Checkpoints of a whole job: its agents stop all processes, copy what these keep, and let them go on."""

import time
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from geomx_cli.core.agent_protocol import Frozen, Kept
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.units import some_of
from geomx_cli.hosts import everywhere
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.actions.streams import ask_agent
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["CheckpointRound", "newest_checkpoint"]

_FREEZING, _COPYING = 8.0, 600.0  # seconds for all agents
_SOON = 5.0  # seconds until another attempt


class CheckpointRound:
    """Takes a checkpoint of the job regularly, and on demand. For the main thread.

    every: seconds between two; 0 for none.
    tell: gets a problem, each once.
    on_whole: gets the number and the hosts of each one that is whole.
    newest: when the last whole one was taken, in Unix seconds; None before.
    """

    def __init__(
        self, pool: AgentPool, every: float, tell: Callable[[str], object],
        on_whole: Callable[[int, Collection[str]], object] = lambda number, hosts: None,
    ) -> None:  # fmt: skip
        self._pool = pool
        self._every = every
        self._tell = tell
        self._on_whole = on_whole
        self._hosts: tuple[str, ...] = ()
        self._told = set[str]()
        self._due = time.monotonic() + every
        self._deadline = 0.0
        self._freezing, self._copying = set[str](), set[str]()  # hosts of which an answer is awaited
        self._number = 0
        self._problems: list[str] = []
        self._then: Callable[[], object] | None = None
        self.newest: int | None = None

    @property
    def _is_running(self) -> bool:
        return bool(self._freezing or self._copying)

    def before(self, then: Callable[[], object], hosts: Collection[str]) -> None:
        """Take one, and then call `then`, also if it fails; at once in a job that has none."""
        self._then = then
        if not self._every:
            self._end()
        elif not self._is_running:
            self._begin(hosts)

    def check(self, hosts: Collection[str], *, is_up: bool) -> None:
        """Call regularly. hosts: of agents that run. is_up: no process is begun or ended."""
        now = time.monotonic()
        if self._is_running and now > self._deadline:
            silent = sorted(self._freezing or self._copying)
            self._problems.append(f"no answer from {some_of(silent, 4)}")
            self._finish()
        elif self._every and is_up and not self._is_running and now >= self._due:
            self._begin(hosts)

    def on_message(self, host: str, message: Frozen | Kept) -> None:
        """An agent has answered."""
        waiting = self._freezing if isinstance(message, Frozen) else self._copying
        if host not in waiting:
            return
        waiting.discard(host)
        if isinstance(message, Frozen):
            self._number = max(self._number, message.newest + 1)
        if message.problem:
            self._problems.append(f"host {host}: {message.problem}")
        if self._is_running:
            return
        if isinstance(message, Frozen) and not self._problems:
            self._copying = set(self._hosts)
            self._deadline = time.monotonic() + _COPYING
            self._pool.broadcast({"type": "keep", "number": self._number})
        else:
            self._finish()

    def _begin(self, hosts: Collection[str]) -> None:
        self._hosts = tuple(hosts)
        self._freezing, self._problems = set(hosts), []
        self._number = max(int(time.time()), self._number + 1)
        now = time.monotonic()
        self._deadline, self._due = now + _FREEZING, now + self._every
        self._pool.broadcast({"type": "freeze"})

    def _finish(self) -> None:
        self._freezing, self._copying = set(), set()
        if not self._problems:
            self.newest = self._number
            self._on_whole(self._number, self._hosts)
        else:
            self._pool.broadcast({"type": "thaw"})
            if self.newest is not None:  # else a script may keep no state, and will not
                self._due = min(self._due, time.monotonic() + max(_SOON, self._every / 10))
            first = min(self._problems)
            if first not in self._told:
                self._told.add(first)
                self._tell(f"no checkpoint: {first}")
        self._end()

    def _end(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()


class _Found(msgspec.Struct):
    """The output of agent/checkpoints.py."""

    folder: str
    whole: dict[str, list[str]]
    others: list[str]


def newest_checkpoint(job: KnownJob, note: Callable[[str], object]) -> tuple[int, dict[str, str]]:
    """Return the number of the newest checkpoint that is whole on all hosts of a job, and its folders by host.

    note: gets a sentence about what is skipped. Raises InvalidSettings if there is none, and the hosts' errors.
    """
    hosts = job.open_hosts()

    def ask(name: str) -> tuple[str, _Found]:
        answer = ask_agent(hosts[name], "checkpoints", job.directory_on(name), limit=60.0, kind=_Found)
        return name, answer

    try:
        found = dict(everywhere(ask, list(hosts)))
    finally:
        for connector in hosts.values():
            connector.close()
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
