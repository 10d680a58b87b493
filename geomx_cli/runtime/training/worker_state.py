"""What a worker saves, so that its next life continues where this life was killed.

One rule makes the next life exact: a worker saves the changes of a round before it contributes to the next round. So
the servers are at most one round ahead of the saved state. The next life computes this round again, to the same bytes,
and the servers send its result again. Numbers that depend on time, such as the steps of an ESync round, are saved
before the contribution. Between rounds a worker saves every two seconds, so at most two seconds of computing are lost.

A script saves only if it calls `state` (runtime/script/training_state.py). Before a worker's first contribution, its
next life may begin anew. Later it needs the saved state. Collective operations are rounds too, and there may be several
between two saves: their results are kept for the next life (ps/result_log.py).

The workers of a party's process group save together, and continue from the same save (group_saves.py).

If there is no room for the state, the worker warns once and saves nothing more. The job continues.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.state_notes import StateNotes, lack_of_room
from geomx_cli.ps.result_log import ResultLog
from geomx_cli.ps.state_file import Saved, StateFile
from geomx_cli.runtime.training.group_saves import GroupSaves, SavingGroup
from geomx_cli.runtime.training.worker_algorithm import Contributed, State

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["INTERVAL", "WorkerState"]

INTERVAL = 2.0
"""Seconds of computing between two saves within a round."""
_FILE = "worker"
_SET_UP, _TRAINING, _CLIENT, _ROUND, _NUMBER = "set up", "training", "client", "round", "number"
_NO_STATE = "geomx starts a killed worker again if its script saves its training: see geomx_cli.torch.state"
_NO_RESULTS = "collective operations have brought more than is kept for a restart of this worker"


class WorkerState:
    """The state file of one worker, with the last record of an earlier life. For the training thread only.

    directory: of the process; None if recovery is off, and then every call does nothing.
    warn: gets a warning when recovery ends because there is no room.
    optimizers: how many this worker has set for the servers, in this life or earlier ones.
    advice: returns a hint for the user: what the script lacks so that its training can be saved.
    """

    def __init__(self, directory: Path | None, warn: Callable[[str], object]) -> None:
        self.optimizers = 0
        self.advice: Callable[[], str] = lambda: _NO_STATE
        self._directory = directory
        self._warn = warn
        self._file: StateFile | None = None
        self._found: Saved | None = None
        self._contributed: dict[int, Contributed] = {}  # by round
        self._rounds: int | None = None
        self._is_recorded = False  # training is
        self._saved = 0.0
        self._results: ResultLog | None = None
        self._rounds_of_client: Callable[[], Mapping[int, int]] = dict  # with results, by key
        self._group: GroupSaves | None = None
        if directory is not None:
            self._open(directory)

    def _open(self, directory: Path) -> None:
        try:
            self._file = StateFile(directory / _FILE, keeps_two=True)
            saved = dict(self._file.load())
        except OSError as error:
            self._end(error)
            return
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise self._unreadable(error) from error
        self.optimizers = saved[_SET_UP].fields["optimizers"] if _SET_UP in saved else 0
        self._found = saved.get(_TRAINING)
        if _ROUND in saved:
            rounds = saved[_ROUND].fields["rounds"]
            self._contributed = {int(round_): Contributed(int(steps), when) for round_, steps, when in rounds}

    @property
    def continues(self) -> bool:
        """Whether there is a record of an earlier life, until it is restored."""
        return self._found is not None

    def join_group(self, group: SavingGroup) -> bool:
        """Let this worker save together with a group, whose workers all call this before any other method; blocks. All
        continue from the newest save that each of them has. Return whether there may be such a save.
        """
        own = self._found.fields.get(_NUMBER, 0) if self._found is not None else 0
        agreed = GroupSaves.agree(group, None if self._file is None else own)
        if self._file is None or agreed is None:
            if self._file is not None:
                self._drop("another worker of its party saves nothing")
            return False
        if own > agreed:
            self._found = self._file.step_back(_TRAINING)
        self._group = GroupSaves(group, self._is_late)
        self._group.number = agreed
        return True

    def restore(self, load: Callable[[State, Saved], None]) -> None:
        """Go on from the record of an earlier life.

        load: gets the state of training and the client's state.
        Raises InvalidSettings for a record that this version cannot read.
        """
        found, self._found = self._found, None
        assert found is not None
        self._is_recorded = True
        try:
            state = State(found.fields, found.arrays)
            client = state.part(_CLIENT)
            load(state.part(_TRAINING), Saved(client.values, client.arrays))
            if self._results is not None:
                self._results.begin(self._rounds_of_client())
        except (KeyError, TypeError, ValueError) as error:
            raise self._unreadable(error) from error

    @property
    def saves(self) -> bool:
        """Whether `save` has an effect."""
        return self._file is not None

    @property
    def folder(self) -> Path:
        """The folder for further files that have to outlive this process; only if it `saves`."""
        assert self._directory is not None
        return self._directory

    @property
    def may_save(self) -> bool:
        """Whether `save` has an effect, and workers of a group are as far as their last saves."""
        return self.saves and (self._group is None or self._group.may_save)

    @property
    def saves_alone(self) -> bool:
        """Whether this worker `saves` at any time, independently of other workers."""
        return self.saves and self._group is None

    def peek(self) -> State | None:
        """The state of training that `restore` will load, None if there is none. Do not change it."""
        return None if self._found is None else State(self._found.fields, self._found.arrays).part(_TRAINING)

    def keep_results(self, client: "Client", prefix: str) -> None:
        """Keep results of rounds between saves. So keys that begin with `prefix`, those of collective operations, may
        have rounds before there is a record of training, and any number between two saves.
        """
        if self._file is None:
            return
        assert self._directory is not None
        try:
            results = ResultLog(self._directory, self._note_gap, continues=self.continues)
        except OSError as error:
            self._end(error)
            return
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise self._unreadable(error) from error
        self._results = results
        self._rounds_of_client = client.recovery.rounds
        client.recovery.keep_results(results)
        client.recovery.before_contribution = (
            lambda name: not name.startswith(prefix) and self.before_contribution(name)
        )  # fmt: skip

    def _note_gap(self, has_gap: bool) -> None:
        """In any thread."""
        assert self._directory is not None
        notes = StateNotes(self._directory)
        if has_gap:
            notes.end(why=_NO_RESULTS)
        else:
            notes.go_on()

    def before_contribution(self, name: str = "") -> bool:
        """Before this worker's first contribution: without a record of its training no life follows this one.

        Return True: it need not be called again. Raises InvalidSettings if there is a record which this life has not
        restored.
        """
        if self.continues:
            what = "this worker was started again, and trains without what it has saved before"
            raise InvalidSettings(what, "call geomx.state before the first step, each time that the script runs")
        if self._file is not None and not self._is_recorded:
            self._drop(self.advice())
        return True

    def give_up(self, why: str, *, tells: bool = True) -> None:
        """Save nothing more: this worker cannot be restarted. tells: whether this worker warns of it, with the reason.
        """
        if self._file is not None:
            self._drop(why)
            if tells:
                self._warn(f"{why}; so if this worker is killed from now on, the job ends")

    def _drop(self, why: str) -> None:
        """Remove the saved state, because it is older than the servers' state."""
        assert self._directory is not None
        StateNotes(self._directory).end([_FILE], why)  # before its results go
        self.close()

    @property
    def is_set_up(self) -> bool:
        """Whether the servers have the job's optimizer from this worker."""
        return self.optimizers > 0

    def set_up(self, optimizers: int = 1) -> None:
        """The servers have so many optimizers from this worker. Another request for one of them, once rounds have
        begun, might begin it anew.
        """
        self.optimizers = optimizers
        self._commit(_SET_UP, State({"optimizers": optimizers}))

    def contribute(self, rounds: int, contributed: Contributed) -> None:
        """This worker contributes this, which follows from time, to the round after so many."""
        if self._file is None:
            return
        self._contributed[rounds] = contributed
        self._commit(_ROUND, State({"rounds": [[round_, *each] for round_, each in self._contributed.items()]}))

    def contributed(self, rounds: int) -> Contributed | None:
        """What an earlier life contributed to the round after so many; None if nothing, or if that is not known."""
        return self._contributed.get(rounds)

    def is_due(self, rounds: int) -> bool:
        """Whether to save, after so many rounds: one was completed since the last save, or time has passed."""
        late = self._is_late() if self._group is None else self._group.is_due
        return self.may_save and (rounds != self._rounds or late)

    def _is_late(self) -> bool:
        return self._file is not None and time.monotonic() - self._saved >= INTERVAL

    def save(self, rounds: int, training: State, client: Saved) -> None:
        """Replace what is saved."""
        state = State()
        state.add(_TRAINING, training)
        state.add(_CLIENT, State(client.fields, client.arrays))
        if self._group is not None:
            state.values[_NUMBER] = self._group.number + 1
        self._commit(_TRAINING, state)
        if self._group is not None:
            self._group.saved()
        self._is_recorded = True
        oldest = rounds if self._group is None else self._rounds or 0  # its next life may step back
        self._rounds, self._saved = rounds, time.monotonic()
        self._contributed = {round_: each for round_, each in self._contributed.items() if round_ >= oldest}
        if self._results is not None:
            size = sum(array.nbytes for array in state.arrays.values())
            self._results.clear(size, self._rounds_of_client())
            if self._results.has_gap:  # before the first save
                self.give_up(_NO_RESULTS)

    def close(self) -> None:
        """Nothing follows."""
        if self._file is not None:
            self._file.close()
        self._file = None
        if self._results is not None:
            self._results.close()

    def _commit(self, name: str, state: State) -> None:
        if self._file is None:
            return
        arrays = {key: np.ascontiguousarray(array) for key, array in state.arrays.items()}
        try:
            self._file.commit(name, state.values, arrays)
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> None:
        """Recovery is over."""
        self._drop("")
        assert self._directory is not None
        why = error.strerror or str(error)
        self._warn(lack_of_room(self._directory, why, "this worker is killed", "--restarts 0"))

    def _unreadable(self, error: Exception) -> InvalidSettings:
        what = f"the state in {self._directory} cannot be read: {error!r}"
        return InvalidSettings(what, "was geomx installed anew while the job ran? launch it again")
