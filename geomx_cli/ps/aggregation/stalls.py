"""Members that cannot go on because what they have sent waits for others: they are asked for what the others lack.

A contribution keeps its place in its sender's window until its round is complete. Members that send different slices
first may so fill their windows with what waits for each other. And a round at one root may wait for a party whose
workers' windows are full of what waits at another root.
"""

import time
from collections.abc import Callable, Iterator

from geomx_cli.ps.aggregation.slice_state import Cohort, SliceState
from geomx_cli.ps.aggregation.slice_table import SliceTable
from geomx_cli.ps.net.link import Link

__all__ = ["STALL", "Stalls"]

STALL = 0.02
"""Seconds without a contribution after which members may be stuck."""
LONGEST_LOOK = 0.5
"""Seconds after which `look` looks also while contributions still come."""
MAX_ASKED = 16
MAX_WANTED = 65_536

_Where = tuple[int, int, int, int]  # key, slice, number of the cohort, round


class Stalls:
    """`links_of` finds the links of a rank. `tell_roots` tells them that members of this party are stuck; None at a
    root. Used by the loop's thread only.
    """

    def __init__(
        self, table: SliceTable, links_of: Callable[[int], list[Link]], tell_roots: Callable[[], None] | None = None
    ) -> None:
        self._table = table
        self._links_of = links_of
        self._tell_roots = tell_roots
        self._elsewhere: dict[int, int] = {}  # members stuck by what waits at other roots, and what they had sent here
        self._wanted: dict[tuple[int, int], int] = {}  # slices that a root lacks, and of which round
        self._asked: dict[_Where, set[int]] = {}  # whom was asked out of turn for which contribution
        self._moves = self._told = 0
        self._looked, self._pending = 0.0, False

    def look(self) -> None:
        """Ask members for missing slices that may be stuck behind others of theirs, so that no order of pushes blocks.

        Only slices that become complete by it are asked for; another would wait as well, and take memory while a slow
        member keeps all waiting.

        To be called every STALL seconds. It costs nothing while contributions come, nor when nothing has changed since
        it has found nothing to ask for, however many slices are open.
        """
        now, changed, self._moves = time.monotonic(), self._table.moves != self._moves, self._table.moves
        self._pending = self._pending or changed
        if not self._pending or (changed and now - self._looked < LONGEST_LOOK):
            return
        self._looked = now
        self._pending = self._ask(now) or changed

    def want(self, key: int, index: int, round_: int) -> None:
        """A root waits for this slice, and this party is stuck: complete it, also if no member has sent any of it."""
        if len(self._wanted) < MAX_WANTED:
            self._wanted[key, index] = round_
            self._pending = True

    def stuck_elsewhere(self, rank: int) -> None:
        """This member is stuck by what waits at other roots; that holds until it sends something."""
        self._elsewhere[rank] = self._table.came[rank]
        self._pending = True

    def connected_anew(self, rank: int) -> None:
        """What this member was asked for may have been lost with its connection; it may be asked again."""
        self._pending = True
        for asked in self._asked.values():
            asked.discard(rank)

    def roots_anew(self) -> None:
        """What a root was told may have been lost with the connection to it."""
        self._pending, self._told = True, -1

    def _ask(self, now: float) -> bool:
        """Ask for some slices; False where there are none, nor any that may become so."""
        stuck = {rank for rank, came in self._elsewhere.items() if came == self._table.came[rank]}
        stuck.update(*(round_.accumulator.without_credit() for _, _, round_ in self._table.open_rounds()))
        known, self._asked = self._asked, {}
        count, young = 0, False
        for key, index, cohort in self._waiting() if stuck else ():
            # A later round cannot be complete before this one.
            number = cohort.closed + 1
            round_ = cohort.rounds.get(number)
            where = (key, index, cohort.member, number)
            asked = self._asked[where] = known.get(where, set())
            missing = set(self._table.members(cohort)) if round_ is None else self._table.missing(cohort, round_)
            if not missing <= stuck or count >= MAX_ASKED:
                continue
            if round_ is not None and now - round_.started < STALL:
                young = True
                continue
            for rank in missing - asked:
                count += 1
                asked.add(rank)
                for link in self._links_of(rank):
                    link.ask_for(key, index, number)
        if stuck and not count and not young and self._tell_roots is not None and self._told != self._table.moves:
            self._told = self._table.moves
            self._tell_roots()
        return count > 0 or young

    def _waiting(self) -> Iterator[tuple[int, int, Cohort]]:
        """Slices whose next round waits for members: some have sent it or a later one, or a root wants it."""
        found = {(entry.slot.id, cohort.member): (entry, cohort) for entry, cohort, _ in self._table.open_rounds()}
        entries: dict[tuple[int, int], SliceState] = self._table.entries
        for where, number in list(self._wanted.items()):
            entry = entries.get(where)
            if entry is not None and entry.forwarded >= number:
                del self._wanted[where]
            elif entry is None:
                yield *where, Cohort(0)
            else:
                found.setdefault((where, 0), (entry, entry.cohort(0)))
        for (where, _), (_, cohort) in found.items():
            if cohort.closed == cohort.finished:
                yield *where, cohort
