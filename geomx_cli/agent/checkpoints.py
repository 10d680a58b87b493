"""An agent's part in checkpoints, which the control machine or a visitor requests.

What survives a process (state_folder.py) is at every moment a point from which it goes on as if it was killed then. So
a checkpoint needs no help of the processes: they are stopped by SIGSTOP, on all hosts of the job, their folders are
copied, and they go on. What they say between the stop of the first and of the last changes nothing: the same would be
on its way if they were killed at these moments. A process that goes on during the copy makes it worthless.
"""

import errno
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from geomx_cli.agent.checkpoint import Checkpoint, folder_of, newest, remove_all
from geomx_cli.agent.child import Child
from geomx_cli.agent.control import Message
from geomx_cli.agent.freeze import Freeze

__all__ = ["BUSY", "NO_STATE", "Checkpoints"]

BUSY = "another checkpoint is being taken"
NO_STATE = "keeps no state (a script does with geomx.state)"
_ORDER = 15.0  # seconds until processes go on, if no order to copy arrives
_ENDING = 5.0  # seconds for the end of a copy whose folder is removed
_COPYING = 120.0  # seconds until processes go on, if the copy is not done


class Checkpoints:
    """Takes one checkpoint at a time: suspends all processes ("freeze"), copies what they keep ("keep"), and lets them
    go on, also without an order. Used by the agent's loop only; a thread copies.

    A request has a number, that of its checkpoint. Who asked to freeze, with which number, orders the rest.

    directory: the agent's.
    answer: sends a message to a visitor; 0: the control machine.
    silence: seconds for which others wait for a process that does not answer.
    uploading: returns the number of the one that is not to be removed, as it is being uploaded; 0 for none.
    """

    def __init__(
        self, directory: Path, children: Sequence[Child], answer: Callable[[int, Message], object],
        silence: float = 2 * _COPYING, uploading: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        self._directory = directory
        self._children = children
        self._answer = answer
        self._limit = min(_COPYING, silence / 2)
        self._uploading = uploading
        self._freeze: Freeze | None = None
        self._copy: _Copy | None = None
        self._visitor = self._number = 0

    @property
    def frozen(self) -> bool:
        """Whether the processes are suspended."""
        return self._freeze is not None and self._freeze.lasts

    def obey(self, message: Message, *, running: bool) -> None:
        """Do a part of a checkpoint, and answer. running: all processes are."""
        visitor, number = int(message.get("visitor", 0)), int(message.get("number", 0))
        match message.get("type"):
            case "freeze":
                problem = "" if running else "its processes begin or end"
                problem = problem or self._begin(visitor, number)
                about = {"number": number, "newest": newest(self._directory)}
                self._answer(visitor, {"type": "frozen", "problem": problem, **about})
            case "keep":
                if problem := self._keep(visitor, number):
                    self._answer(visitor, {"type": "kept", "number": number, "problem": problem})
            case "thaw" if (visitor, number) == (self._visitor, self._number):
                self.void("the checkpoint was given up")

    def void(self, why: str) -> None:
        """Let the processes go on, if they are suspended. There is no checkpoint then."""
        if self._freeze is not None:
            self._freeze.end(why)

    def check(self) -> None:
        """Call regularly."""
        if self._copy is None or self._freeze is None or self._freeze.lasts:
            return  # whoever is told the end of a request finds the processes running
        problem = self._freeze.void or self._copy.problem
        if problem is not None and not self._copy.is_answered:
            self._copy.is_answered = True
            self._answer(self._visitor, {"type": "kept", "number": self._number, "problem": problem})
        if self._copy.problem is not None:
            self._copy.join()  # it has nothing more to do
        if not self._copy.is_alive():
            self._copy = None

    def remove(self) -> None:
        """Remove all checkpoints: the job is done. A copy that is still being written ends."""
        remove_all(self._directory)
        if self._copy is not None:  # it may have created the folder again
            self._copy.join(_ENDING)
            remove_all(self._directory)

    def _obstacle(self) -> str:
        """Why the processes cannot be suspended now; "" if they can."""
        if self._copy is not None and self._copy.is_answered:
            return f"the copy before has not ended yet, in {folder_of(self._directory)}"
        if self.frozen or self._copy is not None:
            return BUSY
        return self._lack()

    def _lack(self) -> str:
        """Why the processes cannot have a checkpoint now; "" if they can."""
        for child in self._children:
            if child.life.look() not in (None, 0):
                return f"{child.name} has just died"
            if child.lost_state:
                return f"the state of {child.name} was removed"
            if child.lacks_state and not child.task.role.endswith("scheduler"):
                return f"{child.name} {NO_STATE}"
        return ""

    def _begin(self, visitor: int, number: int) -> str:
        """Suspend the processes. Return why that is impossible; "" if they are."""
        if problem := self._obstacle():
            return problem
        if (last := newest(self._directory)) >= number:
            return f"its newest checkpoint has the number {last}"
        lives = [child.life for child in self._children]
        self._freeze = Freeze([life.identity.pid for life in lives if life.running and life.identity])
        if problem := self._freeze.begin(min(_ORDER, self._limit), "no order to copy came"):
            return problem
        if problem := self._lack():  # it has died, or stopped saving its state, before it was suspended
            self._freeze.end(problem)
            return problem
        self._visitor, self._number = visitor, number
        return ""

    def _keep(self, visitor: int, number: int) -> str:
        """Begin to copy the state of the suspended processes. Return why that is impossible; "" if it is not."""
        freeze = self._freeze
        if freeze is None or (visitor, number) != (self._visitor, self._number):
            return f"its processes are not suspended for checkpoint {number}"
        if not freeze.lasts or self._copy is not None:
            return freeze.void or BUSY
        freeze.limit(self._limit, "its state could not be copied")
        self._copy = _Copy(self._directory, number, self._children, freeze, lambda: {self._uploading()})
        self._copy.start()
        return ""


class _Copy(threading.Thread):
    """Copies the state of suspended processes, and lets these go on. With a disk it may hang for ever.

    problem: why there is no checkpoint, "" if there is one; None before the end.
    is_answered: who has asked for it has been told.
    """

    def __init__(
        self, directory: Path, number: int, children: Sequence[Child], freeze: Freeze,
        kept: Callable[[], Collection[int]],
    ) -> None:  # fmt: skip
        super().__init__(name="checkpoint", daemon=True)
        self.problem: str | None = None
        self.is_answered = False
        self._directory = directory
        self._number = number
        self._sources = [child.state_dir for child in children if child.state_dir is not None]
        self._incarnations = {child.name: child.incarnation for child in children}
        self._freeze = freeze
        self._kept = kept

    def run(self) -> None:
        problem = ""
        try:
            Checkpoint.write(
                self._directory, self._number, self._sources, self._incarnations, self._end_freeze, self._kept
            )
        except OSError as error:
            problem = f"it cannot be written: {error.strerror}"
        except Exception as error:  # otherwise the thread would hide it
            problem = f"it cannot be written: {error!r}"
            print(problem, file=sys.stderr, flush=True)
        self._freeze.end(problem or "its copy ended")
        self.problem = problem  # last: whoever reads it may begin the next checkpoint

    def _end_freeze(self) -> None:
        """Let the processes go on. Raises OSError if they have not stood still: the copy may mix two moments."""
        if not self._freeze.end():
            raise OSError(errno.ECANCELED, self._freeze.void)
