"""Detects stragglers and names them before the patience of the waiting processes ends.

Workers only see that a result is missing. The server above them knows whose contribution is missing; a root knows which
party has not contributed, and asks that party's server which worker it is.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from geomx_cli.core.errors import GeomxError, PeerLost
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.liveness import newest
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.server_members import ServerMembers
from geomx_cli.ps.net.link import Link

__all__ = ["PendingWait", "StragglerMonitor"]

WARN, GIVE_UP, GIVE_UP_PARTY = 0.5, 0.9, 0.95
"""Parts of the option `patience`. A party's own server sees more than a root, so it goes first."""
ANSWER = 1.0
LATE, MOST_NAMES = 10.0, 5
"""Seconds after which status says who is awaited, and names in that."""


@dataclass(frozen=True)
class PendingWait:
    """Since `began` (time.monotonic seconds) members wait for these ranks, which have not done `what`."""

    what: str
    began: float
    ranks: frozenset[int]
    why: str = "while others have"


class StragglerMonitor:
    """Warns at half of the patience, and fails the job with PeerLost near its end. Used by the loop's thread only.

    The clock restarts with any traffic on a link to the awaited members or behind it, and while their training code
    runs (Activity), so neither a slow link nor a long evaluation ends a job. It
    stops while one of those links is silent; the option `silence` covers that case.

    waits: returns the current waits for live members; deaths are detected elsewhere. A server whose members have all
    contributed waits for the roots and blames no one.
    """

    def __init__(self, node: Node, members: ServerMembers, waits: Callable[[], Iterable[PendingWait]]) -> None:
        self._node = node
        self._members = members
        self._waits = waits
        self._warned: set[PendingWait] = set()

    def begin(self) -> None:
        """Start the periodic check."""
        self._node.loop.every(min(1.0, self._node.patience / 40), self._poll)

    def stragglers(self) -> list[str]:
        """The processes that members wait for here; all training processes if no one is waiting yet."""
        for wait in self._waits():
            return self._members.names(wait.ranks)
        return self._members.names(self._members.training())

    def awaited(self) -> str:
        """Some of the processes that others have been waiting for here for a while, whatever the reason; "" for none.
        """
        late = (wait.ranks for wait in self._waits() if time.monotonic() - wait.began > LATE)
        return ", ".join(self._members.names(frozenset[int]().union(*late))[:MOST_NAMES])

    def _poll(self) -> None:
        waits = set(self._waits())
        self._warned &= waits
        for wait in waits:
            moved = newest(link for rank in wait.ranks for link in self._members.links(rank))
            part = (time.monotonic() - max(wait.began, moved)) / self._node.patience
            parties = all(self._members.is_party(rank) for rank in wait.ranks)
            if part >= (GIVE_UP_PARTY if parties else GIVE_UP):
                self._find(wait, self._give_up)
            elif part >= WARN and wait not in self._warned:
                self._warned.add(wait)
                self._find(wait, self._warn)

    def _find(self, wait: PendingWait, say: Callable[[Sequence[str], str], None]) -> None:
        """Call `say` with the names of the awaited processes and the reason, after the parties' servers have answered.

        A server that does not answer, or reports that none of its workers is the cause, is named itself.
        """
        found: dict[Link, list[str]] = {}
        links = [(rank, self._members.links(rank)[0]) for rank in sorted(wait.ranks)]

        def heard(link: Link, answer: Body | GeomxError) -> None:
            processes = answer.get("processes") if isinstance(answer, dict) else None
            found[link] = [str(name) for name in processes or [link.name]]
            if len(found) == len(links):
                names = [name for _, link in links for name in found[link]]
                since = time.monotonic() - wait.began
                say(names, f"{_have(names)} not {wait.what} for {since:.0f} s, {wait.why}")

        for rank, link in links:
            if self._members.is_party(rank):
                self._node.rpc.ask(link, "stragglers", {}, partial(heard, link), partial(heard, link), ANSWER)
            else:
                heard(link, {})

    def _warn(self, names: Sequence[str], message: str) -> None:
        self._node.events.write(WarningRaised(message=message))

    def _give_up(self, names: Sequence[str], message: str) -> None:
        hint = f"is it stuck or out of step? --patience ({self._node.patience:g}s) is the limit for a round"
        self._node.fail(PeerLost(message, hint, peer=names[0]))


def _have(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]} have" if len(names) > 1 else f"{names[0]} has"
