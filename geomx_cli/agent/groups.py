"""The process groups of parties (`--reduce torch`): if a worker of one is killed, all of its workers begin again.

When the agent notices the death, it kills the others. They report no lost peer before, but wait for their agent
(frontends/torch/party_group.py). When all have ended, all start. If a group has workers on several hosts, each agent
reports when the workers of its host have ended. The control machine then tells the agents to start them
(jobs/actions/group_restarts.py). Without a control machine, the death of one worker ends the job.
"""

import signal
from collections.abc import Iterable, Iterator, Sequence

from geomx_cli.agent.child import Child
from geomx_cli.core.conventions import party_of
from geomx_cli.core.state_notes import StateNotes

__all__ = ["WorkerGroup", "WorkerGroups"]


class WorkerGroup:
    """The workers of one party's group on this host. Not thread-safe.

    members: by rank.
    is_whole: whether no other host has any.
    process, how: the process that has died, on any host, and how; "" while all run. After a death all members are
        ended.
    count: which restart in 10 minutes this is.
    waits: all members have ended, and the control machine was told.
    """

    def __init__(self, party: str, members: Sequence[Child]) -> None:
        self.party = party
        self.members = members
        self.is_whole = len(members) == int(members[0].task.env["GEOMX_GROUP_SIZE"])
        self.process = self.how = ""
        self.count = 0
        self.waits = False
        self._killed: set[Child] = set()

    @property
    def is_pending(self) -> bool:
        """Whether its members are being ended, to begin again."""
        return bool(self.how)

    @property
    def has_ended(self) -> bool:
        """Whether none of its members runs."""
        return not any(member.life.running for member in self.members)

    @property
    def has_ended_member(self) -> bool:
        """Whether one of its members has ended by itself, or was asked to end."""
        statuses = [member.life.status for member in self.members]
        ended = any(status is not None and status >= 0 for status in statuses)
        return ended or any(member.asked for member in self.members)

    @property
    def advice(self) -> str:
        """What the scripts lack so that they can continue, from a member's note; "" if no member has noted it."""
        return next(filter(None, (member.hint for member in self.members)), "")

    def halt(self, process: str, how: str, count: int) -> None:
        """End all members, because this process has died."""
        self.process, self.how, self.count = process, how, count
        for member in self.members:
            if member.life.running:
                self._killed.add(member)
                member.life.signal_group(signal.SIGKILL)

    def begin(self) -> Iterator[tuple[Child, str]]:
        """Yield all members, which start again now, and how each has ended."""
        process, how = self.process, self.how
        for member in self.members:
            if member.state_dir is not None:
                StateNotes(member.state_dir).forget_over()
            yield member, how if member.name == process else f"was ended as {process} {how}"
        self._reset()

    def give_up(self) -> Sequence[Child]:
        """The job ends meanwhile: return the members, none of which begins again. Those that were killed here have not
        failed.
        """
        for member in self._killed:
            member.asked = True
        self._reset()
        return self.members

    def _reset(self) -> None:
        self.process = self.how = ""
        self.waits = False
        self._killed = set()


class WorkerGroups:
    """All groups with members on this host. Not thread-safe."""

    def __init__(self, children: Iterable[Child]) -> None:
        by_party: dict[str, list[Child]] = {}
        for child in children:
            if "GEOMX_GROUP_SIZE" in child.task.env and child.task.role == "worker":
                by_party.setdefault(party_of(child.name), []).append(child)
        self._groups = {party: WorkerGroup(party, members) for party, members in by_party.items()}

    def __iter__(self) -> Iterator[WorkerGroup]:
        return iter(self._groups.values())

    def of(self, child: Child) -> WorkerGroup | None:
        """The group with which a child begins again. None for a child that begins again alone, for example because it
        only leaves the job. If one worker has noted that all scripts are over, this notes it for all members, because a
        worker that missed it waits for it.
        """
        group = self._groups.get(party_of(child.name))
        if group is None or child not in group.members:
            return None
        notes = [StateNotes(member.state_dir) for member in group.members if member.state_dir is not None]
        if group.is_pending or not any(each.is_over for each in notes):
            return group
        for each in notes:
            each.note_over()
        return None

    def named(self, party: str) -> WorkerGroup | None:
        """That of a party."""
        return self._groups.get(party)

    def awaits(self, child: Child) -> bool:
        """Whether a child's group is being ended, so that the child begins again."""
        group = self._groups.get(party_of(child.name))
        return group is not None and group.is_pending and child in group.members

    @property
    def are_pending(self) -> bool:
        """Whether one is being ended, to begin again."""
        return any(group.is_pending for group in self)
