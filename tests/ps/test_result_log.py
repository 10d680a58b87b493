"""Results of rounds that a worker's next life takes from a file, while its servers have only the last of each slice."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps import result_log
from geomx_cli.ps.net.wire import Header, Kind
from geomx_cli.ps.result_log import ResultLog


class Life:
    """A life of a worker, which gets results of one key: of round r an array of r's."""

    def __init__(self, folder: Path, *, continues: bool = False) -> None:
        self.gaps: list[bool] = []
        self.log = ResultLog(folder, self.gaps.append, continues=continues)

    def gets(self, *rounds: int, size: int = 3) -> None:
        """Results arrive."""
        for round_ in rounds:
            header = Header(kind=Kind.RESULT, job=7, key=5, slice=1, round=round_, weight=2.0)
            self.log.keeping(lambda *_: None)(header, np.full(size, round_, np.float32))

    def knows(self, *rounds: int) -> list[int]:
        """Those of these rounds whose results are there."""
        return [round_ for round_ in rounds if self._is_known(round_)]

    def _is_known(self, round_: int) -> bool:
        found: Any = self.log.find(5, 1, round_)
        if found is None:
            return False
        header, array = found
        assert (header.weight, array.dtype) == (2.0, np.float32)
        np.testing.assert_array_equal(array, np.full(3, round_, np.float32))
        return True


def test_a_next_life_has_the_results_before_the_first_save_and_since_the_last_one(tmp_path: Path) -> None:
    first = Life(tmp_path)
    first.gets(1, 2)
    first.log.clear(0, {})
    first.gets(3, 4)
    first.log.clear(0, {})
    first.gets(5, 6)
    second = Life(tmp_path, continues=True)
    second.log.check(5, "key", 1)
    with pytest.raises(InvalidSettings, match="makes other collective operations than before"):
        second.log.check(5, "key", 7)
    assert second.knows(1) == [1]
    second.log.begin({5: 4})
    second.log.check(5, "key", 7)
    assert second.knows(2, 3, 4) == [], "what is loaded is behind them"
    second.log.clear(0, {5: 4})  # it has saved the same again, and is not as far as the first life was
    third = Life(tmp_path, continues=True)
    assert third.knows(1, 2, 3, 4, 5, 6) == [1, 2, 5, 6]
    third.log.clear(0, {5: 6})
    assert Life(tmp_path, continues=True).knows(1, 2, 5, 6) == [1, 2]


def test_results_that_a_save_has_outlived_are_forgotten(tmp_path: Path) -> None:
    """The first life is killed when it has saved what it computed from them, and has not dropped them yet."""
    first = Life(tmp_path)
    first.log.clear(0, {})
    first.gets(5)
    second = Life(tmp_path, continues=True)
    second.log.begin({5: 5})
    for round_ in range(6, 9):
        second.gets(round_)
        second.log.clear(0, {5: round_})
    assert (tmp_path / "results").stat().st_size == 0 and not second.gaps


def test_a_worker_that_has_not_saved_yet_begins_anew_with_what_it_had(tmp_path: Path) -> None:
    Life(tmp_path).gets(1, 2)
    second = Life(tmp_path)
    second.log.check(5, "key", 3)
    assert second.knows(1, 2, 3) == [1, 2]
    second.gets(3)
    assert Life(tmp_path).knows(1, 2, 3) == [1, 2, 3]


def test_no_life_follows_between_too_many_results_and_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_log, "_MOST", 1000)
    life = Life(tmp_path)
    life.log.clear(0, {})
    life.gets(1, 2, size=200)
    assert life.gaps == [True] and life.log.has_gap
    life.log.clear(1000, {})
    assert life.gaps == [True, False]
    life.gets(3, 4, size=200)
    assert life.gaps == [True, False], "twice what is saved may be added"
    life.log.close()
    assert not list(tmp_path.iterdir())
