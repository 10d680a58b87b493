"""What a host's processes begin with: folders for their states, the variables that they inherit, and their numbers."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from geomx_cli.agent import processes, state_folder
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.checkpoint import Checkpoint
from geomx_cli.agent.child import Child
from geomx_cli.agent.groups import WorkerGroups
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.restart_policy import RestartPolicy
from geomx_cli.agent.stop import DISAPPEAR, remains
from geomx_cli.core import state_notes
from geomx_cli.core.errors import CheckFailed

__all__ = ["Beginning"]


class Beginning:
    """Prepares the processes for their first lives, or for the lives after a killed agent, and records what the next
    agent would have to know. Not thread-safe.

    directory: the agent's. warn: gets warnings for the user.
    last: the record of a killed agent, with the numbers of the lives that begin now; None for the first agent.

    life: the number of this agent.
    inherited: the variables that the processes inherit.
    together: how often all processes of the job have begun again.
    """

    def __init__(
        self, directory: Path, host_spec: HostSpec, children: Sequence[Child], groups: WorkerGroups,
        policy: RestartPolicy, warn: Callable[[str], object], last: AgentState | None,
    ) -> None:  # fmt: skip
        self.inherited = host_spec.inherited()
        self.life = last.life if last is not None else 0
        self.together = last.together if last is not None else 0
        self._directory = directory
        self._host_spec = host_spec
        self._children = children
        self._groups = groups
        self._policy = policy
        self._warn = warn
        self._last = last

    def prepare(self) -> None:
        """Prepare all processes to begin. Raises OSError, and ValueError for a damaged checkpoint.

        The permission comes last. If this agent is killed earlier, no other one follows and continues from half a copy
        of a checkpoint.
        """
        folder = self._create_folder()
        if folder is not None:
            self._restore()
            state_folder.keep_environment(folder, self.inherited)
        self.write()
        if folder is not None:
            try:
                state_notes.permit(folder)
            except OSError as error:
                self._warn(f"a killed agent ends the job, as {folder} has no more room ({error.strerror})")

    def _create_folder(self) -> Path | None:
        """Give those that are restarted when they die a folder for their state, in the folder that this returns.
        Without one, none is restarted.
        """
        restarted = [child for child in self._children if self._policy.covers(child.task)]
        if not restarted:
            return None
        folder, problem = state_folder.create(self._directory, self._host_spec.job)
        if folder is None:
            self._policy.limit = 0
            what = f"a killed scheduler or server ends the job, as its state cannot be kept: {problem}"
            how = "make room in /dev/shm (of a container: --shm-size), or choose a --job-dir on a local disk"
            self._warn(f"{what}; {how}")
            return None
        for child in restarted:
            child.state_dir = folder / child.task.file_name
            state_notes.StateNotes(child.state_dir).prepare()  # else the next agent would take it for lost
        return folder

    def _restore(self) -> None:
        """Give the processes what they had in the checkpoint from which the job was launched, if there is one."""
        if not self._host_spec.resume:
            return
        checkpoint = Checkpoint.read(Path(self._host_spec.resume))
        for child in self._children:
            if child.state_dir is not None:
                checkpoint.restore(child)
        if self.together:
            self._warn(f"all processes continue from checkpoint {checkpoint.number}, as when this job was launched")

    def recall(self) -> list[Child]:
        """Prepare the processes to go on for the agent that was killed. Return those that had not ended.

        Raises CheckFailed if the dead ones do not go, or the job's end was asked for meanwhile.
        """
        assert self._last is not None
        if left := processes.kill_all(remains(self._directory, [child.name for child in self._children]), DISAPPEAR):
            pids = ", ".join(str(who.pid) for who in left)
            raise CheckFailed(f"processes of the agent that was killed are left: {pids}", "end them by hand")
        folder = state_folder.continues(self._directory)
        if folder is None:
            raise CheckFailed("the job's end was asked for after its agent was killed", "nothing is left to do")
        self.inherited = state_folder.environment(folder) or self.inherited
        dead = []
        for child in self._children:
            child.asked, child.together = child.name in self._last.asked, self.together
            child.incarnation = self._last.incarnations.get(child.name, 0)
            if self._last.is_open(child.name):
                child.state_dir = folder / child.task.file_name
                dead.append(child)
            else:
                child.life.status = self._last.ended.get(child.name, -signal.SIGKILL)
        return dead

    def update(self) -> None:
        """Record what has changed. On a full disk no other agent follows: it would use numbers of lives again."""
        try:
            self.write()
        except OSError:
            state_folder.forbid(self._directory)

    def write(self) -> None:
        """Record this agent and its processes. Raises OSError."""
        me = processes.identify(os.getpid())
        assert me is not None
        children = self._children
        started = {child.name: child.life.identity for child in children if child.life.identity is not None}
        ended = {child.name: child.life.status for child in children if not self._groups.awaits(child)}
        AgentState(
            agent=me,
            processes={**(self._last.processes if self._last is not None else {}), **started},
            boot=processes.boot_id(),
            life=self.life,
            successions=self._last.successions if self._last is not None else (),
            incarnations={child.name: child.incarnation for child in children},
            ended={name: status for name, status in ended.items() if status is not None},
            asked=tuple(child.name for child in children if child.asked),
            together=self.together,
        ).write(self._directory)
