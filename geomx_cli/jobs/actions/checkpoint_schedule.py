"""When a job that is followed takes a checkpoint: at intervals, and before it is stopped."""

import time
from collections.abc import Callable, Collection

from geomx_cli.core.agent_protocol import Frozen, Kept
from geomx_cli.core.units import format_duration
from geomx_cli.jobs.actions.agent_connection import Send
from geomx_cli.jobs.actions.checkpoint_round import CheckpointRound

__all__ = ["CheckpointSchedule"]

_SOON = 5.0  # seconds until another attempt


class CheckpointSchedule:
    """Takes a checkpoint of the job regularly, and on demand. For the main thread.

    hosts: of the job. Once one of them has ended its part, there is no checkpoint any more.
    every: seconds between two; 0 for none.
    tell: gets a problem, each once.
    on_whole: gets the number and the hosts of each one that is whole.
    newest: when the last whole one was taken, in Unix seconds; None before.
    """

    def __init__(
        self, hosts: Collection[str], send: Send, every: float, tell: Callable[[str], object],
        on_whole: Callable[[int, Collection[str]], object],
    ) -> None:  # fmt: skip
        self._hosts = tuple(hosts)
        self._send = send
        self._every = every
        self._tell = tell
        self._on_whole = on_whole
        self._told = set[str]()
        self._due = time.monotonic() + every
        self._number = 0
        self._round: CheckpointRound | None = None
        self._then: Callable[[], object] | None = None
        self._then_at, self._limit = 0.0, 0.0
        self.newest: int | None = None

    def before(self, then: Callable[[], object], running: Collection[str], limit: float) -> None:
        """Take one, and then call `then`, also if it fails, or is not done in `limit` seconds; at once in a job that
        has none. running: hosts whose agents run.
        """
        self._then, self._then_at, self._limit = then, time.monotonic() + limit, limit
        if self._round is None and self._every and set(self._hosts) <= set(running):
            self._begin()
        elif self._round is None:
            self._go_on()

    def check(self, running: Collection[str], *, is_up: bool) -> None:
        """Call regularly. running: hosts whose agents run. is_up: no process is begun or ended."""
        now = time.monotonic()
        if self._round is None:
            if self._every and is_up and now >= self._due and set(self._hosts) <= set(running):
                self._begin()
            return
        if self._then is not None and now > self._then_at:
            self._round.give_up(f"it was not done within {format_duration(self._limit)}")
        self._round.check()
        self._look()

    def on_message(self, host: str, message: Frozen | Kept) -> None:
        """An agent has answered."""
        if self._round is not None:
            self._round.on_message(host, message)
            self._look()

    def on_lost(self, host: str, how: str) -> None:
        """The connection to an agent broke, or is another one now, or the agent has ended."""
        if self._round is not None:
            self._round.on_lost(host, how)
            self._look()

    def _begin(self) -> None:
        self._due = time.monotonic() + self._every
        self._number = max(int(time.time()), self._number + 1)
        self._round = CheckpointRound(self._hosts, self._send, self._number)

    def _look(self) -> None:
        """Report the outcome of a checkpoint that is over."""
        done = self._round
        if done is None or done.outcome is None:
            return
        self._round, self._number = None, done.number
        if not done.outcome:
            self.newest = done.number
            self._on_whole(done.number, done.hosts)
        else:
            if self.newest is not None:  # else a script may keep no state, and will not
                self._due = min(self._due, time.monotonic() + max(_SOON, self._every / 10))
            if done.outcome not in self._told:
                self._told.add(done.outcome)
                self._tell(f"no checkpoint: {done.outcome}")
        self._go_on()

    def _go_on(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()
