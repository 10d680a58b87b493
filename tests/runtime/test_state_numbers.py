"""The numbers that a script gives geomx.state, and sets: what is saved of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.script.training_state import Place, TrainingState
from geomx_cli.runtime.training.worker_algorithm import State
from geomx_cli.runtime.training.worker_state import WorkerState


class Numbers(TrainingState):
    """The state of a script with nothing but numbers."""

    _rounds, _is_exchanging = 0, False

    def _check(self) -> None:
        assert not self._objects

    def _complete(self) -> None: ...

    def _place_in(self, loader: Any) -> Place:
        raise NotImplementedError

    def _before_batch(self) -> None: ...

    def _of_script(self, objects: Mapping[str, Any]) -> State:
        return State()

    def _load_script(self, objects: Mapping[str, Any], state: State) -> None: ...

    def _begin_again(self) -> None: ...


def begin(folder: Path, **given: Any) -> Numbers:
    """A life of the worker."""
    return Numbers(WorkerState(folder, print), None, given)


def test_numbers_of_numpy_are_saved_as_those_of_python(tmp_path: Path) -> None:
    state = begin(tmp_path, best=np.float32(0.5), count=np.int64(3), done=np.bool_(False), lowest=0.0)
    state.lowest, state.count, state.done = np.float64(0.25), np.uint64((1 << 64) - 1), np.bool_(True)
    assert state.lowest + state.best == 0.75
    state.save()
    later = begin(tmp_path, best=0.0, count=0, done=False, lowest=0.0)
    found = [getattr(later, name) for name in ("best", "count", "done", "lowest", "epoch")]
    assert later.resumed and found == [0.5, (1 << 64) - 1, True, 0.25, 0]
    assert [type(each) for each in found] == [float, int, bool, float, int]


def test_a_number_that_cannot_be_saved_is_refused_where_it_is_set(tmp_path: Path) -> None:
    state = begin(tmp_path, count=1)
    for value in (1 << 64, -(1 << 63) - 1):
        with pytest.raises(InvalidSettings, match="count is an integer of more than 64 bits"):
            state.count = value
    with pytest.raises(InvalidSettings, match="total is an integer"):
        begin(tmp_path / "other", total=1 << 70)
    for other in ("1", None, np.complex64(1)):
        with pytest.raises(TypeError, match="count is a number, not"):
            state.count = other
    assert state.count == 1
    state.save()
