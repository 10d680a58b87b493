"""One checkpoint of a whole job: its agents suspend all processes, copy what these keep, and let them go on."""

import time
from collections.abc import Collection

from geomx_cli.core.agent_protocol import Frozen, Kept
from geomx_cli.core.units import some_of
from geomx_cli.jobs.actions.agent_connection import Send

__all__ = ["CheckpointRound"]

_FREEZING, _COPYING = 8.0, 600.0  # seconds for all agents
_NUMBERS = 3  # tries to find a number that no host has used


class CheckpointRound:
    """Asks the agents of some hosts for one checkpoint. Every agent has to suspend its processes, then every agent has
    to copy; otherwise all let their processes go on, and there is none. Not thread-safe.

    Each message has the number of the checkpoint, so a late answer to an earlier request does not count.

    send: to the agent on a host.
    number: wanted; it grows if a host has used it.
    outcome: why there is no checkpoint, "" if all hosts have it; None before.
    """

    def __init__(self, hosts: Collection[str], send: Send, number: int) -> None:
        self.hosts = tuple(hosts)
        self.number = number
        self.outcome: str | None = None
        self._send = send
        self._tries = self._newest = 0
        self._copies = False  # all processes are suspended
        self._awaited: set[str] = set()  # hosts of which an answer is awaited
        self._problems: list[str] = []
        self._deadline = 0.0
        self._freeze()

    def check(self) -> None:
        """Call regularly."""
        if self.outcome is None and time.monotonic() > self._deadline:
            self.give_up(f"no answer from {some_of(sorted(self._awaited), 4)}")

    def on_message(self, host: str, message: Frozen | Kept) -> None:
        """An agent has answered."""
        if message.number != self.number or isinstance(message, Kept) != self._copies:
            return
        if isinstance(message, Frozen):
            self._newest = max(self._newest, message.newest)
        self._on_answer(host, message.problem)

    def on_lost(self, host: str, how: str) -> None:
        """The connection to an agent broke, or the agent has ended: its answer, or our order, may be lost."""
        if self.outcome is None and host in self.hosts and not self._copies:
            self._awaited.add(host)  # also if its processes were suspended: they go on
        self._on_answer(host, how)

    def give_up(self, why: str) -> None:
        """End it, if it is not over. Hosts that have copied already keep their part, which no other host has."""
        if self.outcome is None:
            self._problems.append(why)
            self._end()

    def _on_answer(self, host: str, problem: str) -> None:
        if self.outcome is not None or host not in self._awaited:
            return
        self._awaited.discard(host)
        if problem:
            self._problems.append(f"host {host}: {problem}")
        if self._awaited:
            return
        if self._problems or self._copies:
            self._end()
        else:
            self._copies, self._awaited = True, set(self.hosts)
            self._deadline = time.monotonic() + _COPYING
            self._tell("keep")

    def _freeze(self) -> None:
        self._tries += 1
        self._copies, self._newest = False, 0
        self._awaited, self._problems = set(self.hosts), []
        self._deadline = time.monotonic() + _FREEZING
        self._tell("freeze")

    def _end(self) -> None:
        if not self._problems:
            self.outcome = ""
            return
        self._tell("thaw")
        if not self._copies and not self._awaited and self._newest >= self.number and self._tries < _NUMBERS:
            self.number = self._newest + 1  # the clock was set back, or others have just taken one
            self._freeze()
        else:
            self.outcome = min(self._problems)

    def _tell(self, kind: str) -> None:
        for host in self.hosts:
            self._send(host, {"type": kind, "number": self.number})
