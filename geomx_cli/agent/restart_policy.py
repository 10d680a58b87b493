"""Which processes that have died are started again."""

import time
from collections import deque
from collections.abc import Callable

from geomx_cli.agent.child import Child
from geomx_cli.agent.groups import WorkerGroup
from geomx_cli.agent.host_spec import Task
from geomx_cli.agent.lifecycle import Stage
from geomx_cli.agent.next_life import ASKED, WINDOW, NextLife, next_life
from geomx_cli.core.root_cause import ending_of

__all__ = ["RestartPolicy"]


class RestartPolicy:
    """Restarts a process that a signal has killed and that had reported no failure, a few times in 10 minutes. Not
    thread-safe.

    A process that ends with an event, an exception or an exit status would end again. So would a process that the
    kernel has killed twice because memory ran out.

    A script's worker that is not restarted may leave the job instead: see `lets_go`.

    limit: restarts of a process within 10 minutes; 0: none.
    clock: seconds.
    on_worker_loss: the option.
    """

    def __init__(
        self, limit: int, clock: Callable[[], float] = time.monotonic, *, on_worker_loss: str = "end"
    ) -> None:
        self.limit = limit
        self._on_worker_loss = on_worker_loss
        self._clock = clock
        self._restarts: dict[Child, deque[float]] = {}
        self._out_of_memory: set[Child] = set()

    def covers(self, task: Task) -> bool:
        """Whether processes with this task are restarted at all."""
        return self.limit > 0 and task.resumes

    def excuses(self, child: Child) -> bool:
        """Whether a server or scheduler was killed when its work was done, so that its death has no effect. For a
        worker this is False: others may still wait for it. Read its events first.

        A process that has sent its goodbye may still have to answer others, and a server may have to save its
        optimizer.
        """
        covered = self.covers(child.task) and child.task.serves
        return covered and child.life.events.finished and (child.life.status or 0) < 0

    def lets_go(self, child: Child, stage: Stage) -> bool:
        """Whether the job continues without a child that has failed: a script's worker that has contributed and has not
        reported a failure.
        """
        told = child.life.events.failure is not None or child.asked or child.departs
        return stage is Stage.RUNNING and not told and self._next_life(child).leaves

    def decide(self, child: Child, stage: Stage, *, memory: bool, group: WorkerGroup | None = None) -> int:
        """Return which restart within 10 minutes is due for a child that has ended, and count it; 0 for none.

        stage: of this host's part of the job. memory: the OOM killer has just ended a process. Read the child's events
        first. group: begins again together with the child.
        """
        status = child.life.status or 0
        asked = child.asked or -status in ASKED
        told = status >= 0 or child.life.events.failure is not None
        if not self.covers(child.task) or stage is not Stage.RUNNING or asked or told:
            return 0
        following = self._next_life(child)
        if not (following.leaves if child.departs else following.continues):
            return 0
        if ending_of(status, memory=memory) == "out of memory":
            if child in self._out_of_memory:
                return 0
            self._out_of_memory.add(child)
        if group is not None:
            return self.decide_group(group)
        return self._count(child)

    def decide_group(self, group: WorkerGroup) -> int:
        """As `decide`, for a group in which a worker has died, perhaps on another host."""
        continue_ = all(self.covers(each.task) and self._next_life(each).continues for each in group.members)
        return self._count(group.members[0]) if continue_ and not group.has_ended_member else 0

    def _next_life(self, child: Child) -> NextLife:
        return next_life(child.task, child.state_dir, child.incarnation + 1, self._on_worker_loss)

    def _count(self, child: Child) -> int:
        times, now = self._restarts.setdefault(child, deque()), self._clock()
        while times and now - times[0] > WINDOW:
            times.popleft()
        if len(times) >= self.limit:
            return 0
        times.append(now)
        return len(times)
