"""When the workers of a party's process group save, and from which save all of them go on.

If one worker dies, all begin again, and each has to load its part of the same step. Between two saves of a worker lies
a collective operation of the group, which all workers begin after the first of these saves. So no worker is more than
one save ahead of another. Each keeps its last two saves, and all continue from the newest save that each of them has.

A worker contributes to a round only when all workers have begun it, and so have saved the previous round. So servers
are at most one round ahead of the common save, and keep no more than for a single worker (worker_state.py).
"""

from collections.abc import Callable
from typing import Protocol

from geomx_cli.core.errors import InvalidSettings

__all__ = ["GroupSaves", "SavingGroup"]


class SavingGroup(Protocol):
    """What saves need of a process group.

    gathers: number of collective operations that this worker has begun; all workers wait in each of them.
    save_is_due: the first worker has announced a save with one of these operations, so all see it at the same place.
    """

    gathers: int
    save_is_due: bool

    def gather(self, value: int) -> list[int]:
        """Every worker's number, from 0; blocks."""

    def use_saves(self, wishes: Callable[[], bool]) -> None:
        """From now on, each gather also carries whether the first worker `wishes` that all save."""


class GroupSaves:
    """The saves of one worker of a group. For the training thread.

    number: of the last one, from 1; 0 before the first.
    wishes: whether enough time has passed since it.
    """

    def __init__(self, group: SavingGroup, wishes: Callable[[], bool]) -> None:
        self.number = 0
        self._group = group
        self._saved_at: int | None = None  # gathers
        group.use_saves(wishes)

    @staticmethod
    def agree(group: SavingGroup, own: int | None) -> int | None:
        """Return the number of the save from which all go on, 0 for none; blocks. None: a worker saves nothing.

        own: the newest of this worker; None if it saves nothing.
        Raises InvalidSettings if no save is one that all have.
        """
        numbers = group.gather(0 if own is None else own + 1)
        least, most = min(numbers), max(numbers)
        if least and most - least > 1:
            what = f"the workers of this party have saved {', '.join(str(number - 1) for number in numbers)} times"
            raise InvalidSettings(what, "let all workers of a party call geomx.state, and save, at the same places")
        return least - 1 if least else None

    @property
    def may_save(self) -> bool:
        """Whether the group has taken a step since the last save; else the others may still have the one before."""
        return self._saved_at != self._group.gathers

    @property
    def is_due(self) -> bool:
        """Whether the first worker wants all to save."""
        return self._group.save_is_due

    def saved(self) -> None:
        """This worker has saved."""
        self.number += 1
        self._saved_at = self._group.gathers
        self._group.save_is_due = False
