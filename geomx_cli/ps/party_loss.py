"""Leaves out a party that has fallen silent, so that the others continue, and takes it in again when it is back.

A root leaves a party out if it is the only one for which a round waits, and nothing has been heard of it for the grace
period. From then on rounds close without the party, and its share counts as the mean of the others. The party's server
keeps its contributions. When it is back, the root answers them with the number of the newest round, and the workers
abstain from all rounds that they have missed, without further messages to the root. Once the party is within NEAR
rounds of the others, they wait for it again. So it takes part in each round of each tensor, once.

Each root decides by itself. A party that only one root does not hear contributes to no root, so the job waits for it.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from geomx_cli.core.errors import PeerLost
from geomx_cli.core.events import WarningRaised
from geomx_cli.core.units import counted, format_duration
from geomx_cli.ps.aggregation.slices import SliceTable
from geomx_cli.ps.cluster.members import Member, ServerMembers
from geomx_cli.ps.cluster.node import Node

__all__ = ["PartyLoss"]

POLL, LATE = 1.0, 2.0
"""Seconds between checks, and by which a check may be late. If it is later, this process was stopped, and has not read
what the parties have sent."""
ROUNDS, LEAST, MOST = 5, 20.0, 120.0
"""The grace period: so many median rounds, within these limits in seconds."""
NEAR = 2
"""A party that is so many rounds behind the open one, or fewer, takes part again."""
KNOWN = 21
"""Durations of rounds from which the median is taken."""


class PartyLoss:
    """Decides at a root which parties are left out. Used by the loop's thread only.

    policy: the option `party_loss`. "end": the job fails where "out" leaves a party out. Any other: it never does.
    on_change: called when a party was left out, or takes part again.
    """

    def __init__(
        self, node: Node, members: ServerMembers, table: SliceTable, policy: str, on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        self._node = node
        self._members = members
        self._table = table
        self._policy = policy
        self._on_change = on_change
        self._checked = 0.0
        self._begun = time.monotonic()
        self._durations: deque[float] = deque(maxlen=KNOWN)
        self._last, self._when = 0, 0.0  # the newest round, and when it ended

    def start(self) -> None:
        """Check from now on, regularly."""
        if self._policy in ("out", "end"):
            self._node.loop.every(POLL, self._poll)

    def has_missed(self, rank: int, behind: int) -> bool:
        """A contribution of this rank has arrived, so many rounds `behind` the open one of its slice. Returns whether
        rounds may have closed without it.
        """
        party = self._members.party(rank)
        if behind <= NEAR and party.state == "out":
            self._members.take_in(rank)
            self._warn(f"party {party.party} takes part again, after {self._absence(party)} without it")
            self._on_change()
        return party.out_since > 0

    def left_out(self) -> dict[str, str]:
        """The parties that are left out, each as "since 12:03:10 (34 rounds)"."""
        return {
            party.party: f"since {_clock(party.out_since)} ({counted(self._rounds_without(party), 'round')})"
            for party in self._members.out
        }

    @property
    def grace(self) -> float:
        """Seconds of silence after which a party is left out."""
        return min(MOST, max(LEAST, ROUNDS * median(self._durations))) if self._durations else MOST

    def _poll(self) -> None:
        pause, self._checked = time.monotonic() - self._checked, time.monotonic()
        self._note_rounds()
        if pause > POLL + LATE:
            return
        for party in self._members.out if not self._members.training() else ():
            if (seconds := self._silence(party.rank)) > self._node.settings.number("silence"):
                what = f"party {party.party} has been silent for {seconds:.0f} s, and all other parties have finished"
                hint = "their workers have saved the final model; see whether the party's hosts run, and their links"
                self._node.fail(PeerLost(what, hint, peer=party.process, missed="silent", seconds=seconds))
        oldest = self._table.oldest()
        missing = oldest[2] if oldest is not None else frozenset[int]()
        if not missing or not all(self._members.is_party(rank) for rank in missing):
            return
        silent = {rank: self._silence(rank) for rank in missing}
        if min(silent.values()) <= self.grace or not self._members.may_leave_out(missing) or self._table.holds_sums:
            return
        for rank, seconds in silent.items():
            self._lose(rank, seconds)

    def _note_rounds(self) -> None:
        now, last = time.monotonic(), self._table.last_round
        if last > self._last:
            if self._last:
                self._durations.append((now - self._when) / (last - self._last))
            self._last, self._when = last, now

    def _silence(self, rank: int) -> float:
        """Seconds for which one of this party's servers has been silent."""
        links = (server.link for server in self._members.of_rank(rank))
        return time.monotonic() - min(self._begun if link is None else link.health.heard for link in links)

    def _lose(self, rank: int, seconds: float) -> None:
        party = self._members.party(rank)
        what = f"party {party.party} has been silent since {_clock(time.time() - seconds)} ({seconds:.0f} s)"
        if self._policy == "end":
            server = party.process
            hint = "see whether its hosts run, and their links; --party-loss out continues without it"
            self._node.fail(PeerLost(what, hint, peer=server, missed="silent", seconds=seconds))
            return
        self._members.leave_out(rank, time.time() - seconds, self._table.last_round)
        self._warn(
            f"{what}: from round {party.out_round + 1} on it is left out, and counts as the mean of the others"
            " (--party-loss)", affects_result=True,
        )  # fmt: skip
        self._on_change()

    def _absence(self, party: Member) -> str:
        """For how long, and for how many rounds, a party was left out."""
        seconds = max(0.0, time.time() - party.out_since)
        return f"{format_duration(seconds)} and {counted(self._rounds_without(party), 'round')}"

    def _rounds_without(self, party: Member) -> int:
        return self._table.last_round - party.out_round

    def _warn(self, message: str, *, affects_result: bool = False) -> None:
        self._node.events.write(WarningRaised(message=message, affects_result=affects_result, common=True))


def _clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))
