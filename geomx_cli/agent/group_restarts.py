"""Ends groups of workers of which one has died, and starts them again: this host's part of it (groups.py)."""

from collections.abc import Callable, Sequence

from geomx_cli.agent.child import Child
from geomx_cli.agent.control import Control
from geomx_cli.agent.groups import WorkerGroup, WorkerGroups
from geomx_cli.agent.restart_policy import RestartPolicy
from geomx_cli.core.conventions import party_of

__all__ = ["GroupRestarts"]


class GroupRestarts:
    """Not thread-safe. While the job runs, a group in which a worker has died ends, and then begins again.

    lease: the option; a control machine may come back within it.
    restart: starts a worker again that has ended, unless the job ends: how it has ended, and which restart in 10
        minutes this is.
    fail: a worker fails; what, and a hint.
    """

    def __init__(
        self, groups: WorkerGroups, policy: RestartPolicy, control: Control, lease: float,
        restart: Callable[[Child, str, int], None], fail: Callable[[Child, str, str], None],
    ) -> None:  # fmt: skip
        self._groups = groups
        self._policy = policy
        self._control = control
        self._lease = lease
        self._restart = restart
        self._fail = fail

    def can_coordinate(self, group: WorkerGroup) -> bool:
        """Whether a group can begin again: all of it is on this host, or a control machine coordinates its hosts, or
        may do this before the lease expires.
        """
        return group.is_whole or self._control.connected or bool(self._lease)

    def halt(self, group: WorkerGroup, process: str, how: str, count: int) -> None:
        """A worker of this host has died: end the group, and begin it again, for the `count`th time in 10 minutes."""
        group.halt(process, how, count)
        self.go_on(group)

    def halt_with(self, process: str, how: str) -> None:
        """A worker of a group has died on another host: end the group's workers on this host."""
        group = self._groups.named(party_of(process))
        if group is None or group.is_pending:
            return
        if count := self._policy.decide_group(group):
            self.halt(group, process, how, count)
        else:
            self._fail(group.members[0], f"cannot begin again together with {process}, which {how}", group.advice)

    def go_on(self, group: WorkerGroup) -> None:
        """A member has ended: begin again once all members have ended here, and on other hosts."""
        if not group.has_ended:
            return
        if group.is_whole:
            self._begin(group)
        elif not group.waits:
            group.waits = True
            self._tell(group)

    def begin(self, party: str) -> None:
        """All members of a party's group have ended, on all hosts."""
        group = self._groups.named(party)
        if group is not None and group.waits:
            self._begin(group)

    def tell_all(self) -> None:
        """Tell a control machine that begins to follow the job which groups wait."""
        for group in self._groups:
            self._tell(group)

    def give_up(self) -> Sequence[Child]:
        """The job ends: no group begins again. Return the members of those that were to."""
        return [member for group in self._groups if group.is_pending for member in group.give_up()]

    def _tell(self, group: WorkerGroup) -> None:
        if group.waits:
            name = group.members[0].name
            self._control.send_durable({"type": "halted", "process": name, "died": group.process, "how": group.how})

    def _begin(self, group: WorkerGroup) -> None:
        for member, how in group.begin():
            self._restart(member, how, group.count)
