"""Leaves out a party that has fallen silent, so that the others continue, and takes it in again when it is back.

A root leaves a party out if a round waits only for it, and nothing has been heard of it for the grace period. From then
on rounds close without the party, and it counts as the mean of the others. The party's server keeps its contributions.
When it is back, the root answers them with the number of the newest round. The workers then abstain from all rounds
that they have missed, without further messages to the root. When the party asks for the first round after these, the
others wait for it again. They wait for the few rounds that they have completed meanwhile. So the party takes part in
each round of each tensor, once, and is back after one such message, whatever its distance.

Each root decides by itself. If only one root does not hear a party, the party contributes to no root, so the other
roots wait for it.
"""

import time
from collections import deque
from collections.abc import Callable
from statistics import median

from geomx_cli.core.errors import PeerLost
from geomx_cli.core.events import WarningRaised
from geomx_cli.core.units import counted, format_duration
from geomx_cli.ps.aggregation.slices import SliceState, SliceTable
from geomx_cli.ps.cluster.members import Member, ServerMembers
from geomx_cli.ps.cluster.node import Node

__all__ = ["PartyLoss"]

POLL, LATE = 1.0, 2.0
"""Seconds between checks, and by which a check may be late. If it is later, this process was stopped, and has not read
what the parties have sent."""
ROUNDS, LEAST, MOST = 5, 20.0, 120.0
"""The grace period: so many median rounds, within these limits in seconds."""
NEAR = 2
"""A party that is so many rounds behind the open one, or fewer, takes part again at once."""
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
        # by party that is out and slice: the newest round of which it was told
        self._told: dict[tuple[int, tuple[int, int]], int] = {}

    def start(self) -> None:
        """Check from now on, regularly."""
        if self._policy in ("out", "end"):
            self._node.loop.every(POLL, self._poll)

    def on_arrival(self, rank: int, entry: SliceState, round_: int, finished: int) -> None:
        """A contribution has arrived. If its party is out and has passed the rounds that it was told of, or is near, it
        takes part again.

        round_: its round. finished: the newest finished round of the slice.
        """
        party = self._members.party(rank)
        if party.state != "out":
            return
        told = self._told.get((rank, entry.id), finished)
        self._told[rank, entry.id] = finished
        if round_ <= told and finished + 1 - round_ > NEAR:
            return
        self._told = {which: newest for which, newest in self._told.items() if which[0] != rank}
        self._members.take_in(rank)
        self._allow(rank)
        self._warn(f"party {party.party} takes part again, after {self._absence(party)} without it")
        self._on_change()

    def allowance(self, rank: int) -> float:
        """Seconds for which links to this party may be silent, if they are more than for others; otherwise 0."""
        return self._node.absence if self._members.party(rank).state == "out" else 0.0

    def left_out(self) -> dict[str, str]:
        """The parties that are left out, each as "since 12:03:10 (34 rounds)"."""
        return {
            party.party: f"since {_clock(party.out_since)} ({counted(self._rounds_without(party), 'round')})"
            for party in self._members.out
        }

    @property
    def grace(self) -> float:
        """Seconds of silence after which a party is left out, before its links count as lost."""
        usual = min(MOST, max(LEAST, ROUNDS * median(self._durations))) if self._durations else MOST
        return min(usual, 0.8 * self._node.settings.number("silence"))

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
        if min(silent.values()) <= self.grace or not self._members.may_leave_out(missing):
            return
        if self._policy == "end":
            self._end(*max(silent.items(), key=lambda item: item[1]))
        elif not self._table.holds_sums:
            for rank, seconds in silent.items():
                self._leave_out(rank, seconds)

    def _note_rounds(self) -> None:
        now, last = time.monotonic(), self._table.last_round
        if last > self._last:
            if self._last:
                self._durations.append((now - self._when) / (last - self._last))
            self._last, self._when = last, now

    def _silence(self, rank: int) -> float:
        """Seconds for which one of this party's servers has been silent."""
        waited = time.monotonic() - self._begun
        links = (server.link for server in self._members.of_rank(rank))
        return max(waited if link is None else self._node.liveness.silence(link) for link in links)

    def _end(self, rank: int, seconds: float) -> None:
        party = self._members.party(rank)
        hint = "see whether its hosts run, and their links; without --party-loss end the job would wait for it"
        self._node.fail(
            PeerLost(_silent(party, seconds), hint, peer=party.process, missed="silent", seconds=seconds)
        )

    def _leave_out(self, rank: int, seconds: float) -> None:
        party = self._members.party(rank)
        self._members.leave_out(rank, time.time() - seconds, self._table.last_round)
        self._allow(rank)
        self._warn(
            f"{_silent(party, seconds)}: from round {party.out_round + 1} on it is left out, and counts as the mean of"
            " the others (--party-loss)", affects_result=True,
        )  # fmt: skip
        self._on_change()

    def _allow(self, rank: int) -> None:
        for link in self._members.links(rank):
            self._node.liveness.allow(link, self.allowance(rank))

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


def _silent(party: Member, seconds: float) -> str:
    return f"party {party.party} has been silent since {_clock(time.time() - seconds)} ({seconds:.0f} s)"
