"""Detects stragglers and names them before the patience of the waiting processes ends.

Workers only see that a result is missing. The server above them knows whose contribution is missing. A root knows which
party has not contributed, and asks this party's server for the worker that is the cause.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from geomx_cli.core.errors import GeomxError, PeerLost
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.aggregation.rounds import Cohort
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.liveness import newest
from geomx_cli.ps.cluster.members import ServerMembers
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop

__all__ = ["DeadlockBreaker", "PendingWait", "SHARE", "StragglerMonitor"]

# Breaks deadlocks between members whose windows are full of contributions that wait for each other. A contribution
# occupies its sender's window until its round is complete. If members send slices in different orders, each may fill
# its window with slices that wait for the other's. This is usual: urgent slices overtake others only where a link is
# slow, so a member behind a slow link sends in a different order from a member beside the server. Also, a round at one
# root may wait for a party whose workers' windows are full of contributions that wait at another root. The cure is to
# ask the blocked members for the missing slices, which they then send without waiting for credit.

STALLED_AFTER = 0.01
"""Seconds after which a round without some members' contributions may be stuck."""
SHARE = 0.05
"""The share of the time that checks may take."""
MAX_ASKED = 64
MAX_WANTED = 65_536

_Where = tuple[int, int, int, int]  # key, slice, cohort number, round


class DeadlockBreaker:
    """Finds slices that wait for blocked members, and requests them. Used by the loop's thread only.

    links_of: returns the links of a rank.
    notify_roots: reports to the roots that members of this party are stuck; None at a root.
    """

    def __init__(
        self, table: SliceTable, links_of: Callable[[int], list[Link]], notify_roots: Callable[[], None] | None = None
    ) -> None:
        self._table = table
        self._links_of = links_of
        self._notify_roots = notify_roots
        # members that are blocked at other roots, and how many contributions they had sent here by then
        self._elsewhere: dict[int, int] = {}
        self._wanted: dict[tuple[int, int], int] = {}  # slices that a root lacks, and the round that it lacks
        self._asked: dict[_Where, set[int]] = {}  # the members that were asked out of order for each contribution
        self._moves = self._notified = 0
        self._next, self._pending = 0.0, False  # when to check again while contributions arrive
        self._is_scheduled = False

    def start(self, loop: Loop) -> None:
        """Check from now on, STALLED_AFTER seconds after each change. So an idle server does not wake up for checks."""

        def check() -> None:
            self._is_scheduled = False
            self.check()

        def schedule() -> None:
            if (self._pending or self._table.moves != self._moves) and not self._is_scheduled:
                self._is_scheduled = True
                loop.call_later(STALLED_AFTER, check)

        loop.each_turn(schedule)

    def check(self) -> None:
        """Ask blocked members for missing slices, so that no order of pushes can deadlock.

        Only slices that these contributions complete are requested. Any other slice would wait too. Then its memory
        would be wasted while a slow member makes all others wait.

        It is cheap if nothing has changed since it last found nothing to request. While contributions arrive, it takes
        at most SHARE of the time, however many slices are open.
        """
        now, changed, self._moves = time.monotonic(), self._table.moves != self._moves, self._table.moves
        self._pending = self._pending or changed
        if not self._pending or (changed and now < self._next):
            return
        self._pending = self._ask(now) or changed
        end = time.monotonic()
        self._next = end + (end - now) / SHARE

    def request_slice(self, key: int, index: int, round_: int) -> None:
        """Complete this slice, even if no member has sent any of it. A root waits for the slice, and this party is
        stuck.
        """
        if len(self._wanted) < MAX_WANTED:
            self._wanted[key, index] = round_
            self._pending = True

    def stuck_elsewhere(self, rank: int) -> None:
        """Mark this member as blocked at other roots, until it sends something here."""
        self._elsewhere[rank] = self._table.came[rank]
        self._pending = True

    def on_reconnect(self, rank: int) -> None:
        """This member has a new connection: requests to it may have been lost and may be repeated."""
        self._pending = True
        for asked in self._asked.values():
            asked.discard(rank)

    def on_root_reconnect(self) -> None:
        """A root has a new connection. The last report may have been lost, so send it again."""
        self._pending, self._notified = True, -1

    def _ask(self, now: float) -> bool:
        """Request missing slices. Returns False if none are missing, and every open round is old enough to judge."""
        stuck = {rank for rank, came in self._elsewhere.items() if came == self._table.came[rank]}
        stuck.update(*(round_.accumulator.without_credit() for _, _, round_ in self._table.open_rounds()))
        known, self._asked = self._asked, {}
        count, young = 0, False
        for (key, index), entry, cohort in self._waiting() if stuck else ():
            number, round_ = cohort.finished + 1, cohort.round
            where = (key, index, cohort.member, number)
            asked = self._asked[where] = known.get(where, set())
            missing = set(self._table.members(entry, cohort))
            if round_ is not None:
                missing = round_.accumulator.missing(missing)
            # Requests complete the round only if every missing member is itself blocked. A member that is merely slow
            # gets no request.
            if not missing <= stuck or count >= MAX_ASKED:
                continue
            if round_ is not None and now - round_.started < STALLED_AFTER:
                young = True
                continue
            for rank in missing - asked:
                count += 1
                asked.add(rank)
                for link in self._links_of(rank):
                    link.request_slice(key, index, number)
        if stuck and not count and not young and self._notify_roots is not None and self._notified != self._table.moves:
            self._notified = self._table.moves
            # Requests complete no slice here. The members may be blocked at another root, so tell the roots.
            self._notify_roots()
        return count > 0 or young

    def _waiting(self) -> Iterator[tuple[tuple[int, int], SliceState | None, Cohort]]:
        """The slices whose next round waits for members, because a member has sent this round or a later one, or a root
        wants it. With the slices' states, None before the first message.
        """
        found = {(entry.id, cohort.member): (entry, cohort) for entry, cohort, _ in self._table.open_rounds()}
        entries: dict[tuple[int, int], SliceState] = self._table.entries
        for where, number in list(self._wanted.items()):
            entry = entries.get(where)
            if entry is not None and entry.forwarded >= number:
                del self._wanted[where]
            elif entry is None:
                yield where, None, Cohort(0)
            else:
                found.setdefault((where, 0), (entry, entry.cohort(0)))
        for (where, _), (entry, cohort) in found.items():
            if cohort.closed == cohort.finished:
                yield where, entry, cohort


WARN, GIVE_UP, GIVE_UP_PARTY = 0.5, 0.9, 0.95
"""Parts of the option `patience`. A party's own server sees more than a root, so it reports first."""
ANSWER = 1.0
LATE, MOST_NAMES = 10.0, 5
"""Seconds after which status names the awaited processes, and at most how many names it has."""


@dataclass(frozen=True)
class PendingWait:
    """Since `began` (time.monotonic seconds) members wait for these ranks, which have not yet done `what`."""

    what: str
    began: float
    ranks: frozenset[int]
    why: str = "while others have"


class StragglerMonitor:
    """Warns at half of the patience, and fails the job with PeerLost near its end. Used by the loop's thread only.

    The clock restarts with any traffic on a link to the awaited members or behind it. It also restarts while their
    training code runs (Activity). So neither a slow link nor a long evaluation ends a job. The clock stops while one of
    these links is silent, because the option `silence` covers this case.

    waits: returns the current waits for live members. Deaths are detected elsewhere. A server whose members have all
        contributed waits for the roots, and blames no process.
    """

    def __init__(self, node: Node, members: ServerMembers, waits: Callable[[], Iterable[PendingWait]]) -> None:
        self._node = node
        self._members = members
        self._waits = waits
        self._warned: set[PendingWait] = set()

    def start(self) -> None:
        """Check from now on, regularly."""
        self._node.loop.every(min(1.0, self._node.patience / 40), self._poll)

    def stragglers(self) -> list[str]:
        """The processes that members wait for here. If no member waits yet, all training processes."""
        for wait in self._waits():
            return self._members.names(wait.ranks)
        return self._members.names(self._members.training())

    def awaited(self) -> str:
        """Some of the processes that others have awaited here for a while, whatever the reason; "" for none.
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

        If a server does not answer, or reports that none of its workers is the cause, the server itself is named.
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
