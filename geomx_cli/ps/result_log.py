"""Results of rounds that a worker has received since its last save. Its next life takes them from here, not from
servers.

A server keeps only the last result of each slice. But between two saves, a script's collective operations may be
several rounds of one key, for example in an evaluation or before the first save. The next life calls the same
operations in the same order. It contributes nothing to rounds whose results are here, and takes these results.
"""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.upstream import OnResult
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.payload import Content, Rows
from geomx_cli.ps.net.wire import Header, encode_header
from geomx_cli.ps.state_file import Journal

__all__ = ["ResultLog"]

_FIRST, _LATEST = "results.first", "results"
_MOST = 1 << 28
"""Limit on the bytes of results between two saves, in addition to twice the saved bytes. Further results are dropped.
Then the worker cannot be restarted until its next save.
"""


class ResultLog:
    """Results by key, slice and round, in two files. One has the results before the worker's first save, which every
    later life needs. The other has the results since its last save.

    folder: has the files.
    continues: whether an earlier life has saved. Then all rounds before `begin` have to be known.
    on_gap: called with True when results for a next life are missing, and with False when a save makes them
        unnecessary; in any thread.
    """

    def __init__(self, folder: Path, on_gap: Callable[[bool], object], *, continues: bool) -> None:
        self._journals = {name: Journal(folder / name) for name in (_FIRST, _LATEST)}
        self._paths = [folder / name for name in self._journals]
        self._on_gap = on_gap
        self._has_begun = continues
        self._repeats = continues  # all rounds that begin now were completed before
        self._lock = threading.Lock()
        self._limit = _MOST
        self._has_gap = self._is_closed = False
        self._known: dict[tuple[int, int, int], tuple[Header, Array]] = {}
        for name in (_FIRST, _LATEST):
            self._load(self._journals[name])
            if name == _FIRST:
                self._first = set(self._known)
        self._rounds = {(key, round_) for key, _, round_ in self._known}

    def _load(self, journal: Journal) -> None:
        for raw, dtype, content in journal.replayed:
            header = msgspec.msgpack.decode(raw, type=Header)
            self._known[header.key, header.slice, header.round] = header, np.frombuffer(content, dtype)
        journal.replayed.clear()

    @property
    def has_gap(self) -> bool:
        """Whether results are missing."""
        return self._has_gap

    # In the client's loop.

    def find(self, key: int, slice_: int, round_: int) -> tuple[Header, Content] | None:
        """A result that an earlier life has got, with its header; None: there is none."""
        with self._lock:
            return self._known.pop((key, slice_, round_), None)

    def keeping(self, on_result: OnResult) -> OnResult:
        """`on_result`, after the result is kept."""

        def keep(header: Header, found: Content) -> None:
            self._add(header, found)
            on_result(header, found)

        return keep

    def _add(self, header: Header, found: Content) -> None:
        with self._lock:
            journal = self._journals[_LATEST if self._has_begun else _FIRST]
            if self._has_gap or self._is_closed:
                return
            if not isinstance(found, Rows) and journal.size + found.nbytes <= self._limit:
                try:
                    journal.append([encode_header(header), found.dtype.str, found.tobytes()])
                except OSError:
                    pass
                else:
                    return
            self._has_gap = True
            self._on_gap(True)

    # In the training thread.

    def check(self, key: int, name: str, round_: int) -> None:
        """A round begins. Raises InvalidSettings if an earlier life of this worker has not begun it at this point, so
        that other workers do not take part.
        """
        if self._repeats and (key, round_) not in self._rounds:
            what = "this worker was started again, and makes other collective operations than before it was killed"
            raise InvalidSettings(f"{what}: {name}, round {round_}", "let the script do the same each time it runs")

    def begin(self, rounds: Mapping[int, int]) -> None:
        """What an earlier life has saved is loaded: from here on rounds may be new. rounds: by key, the last round of
        which the loaded state has the result. The earlier life may have been killed after it had saved this state, and
        before it had dropped the results.
        """
        self._repeats = False
        with self._lock:
            self._forget_first()
            self._forget(rounds)

    def clear(self, saved: int, rounds: Mapping[int, int]) -> None:
        """The worker has saved so many bytes: no next life needs earlier results, but those before the first save.
        rounds: by key, the last round of which the saved state has the result.
        """
        with self._lock:
            if self._is_closed or (self._has_gap and not self._has_begun):
                return
            self._limit = _MOST + 2 * saved
            self._has_begun = True
            self._forget_first()
            self._forget(rounds)
            if self._known:  # this worker has not come as far yet as its earlier life
                return
            self._journals[_LATEST].clear()
            if self._has_gap:
                self._has_gap = False
                self._on_gap(False)

    def _forget(self, rounds: Mapping[int, int]) -> None:
        """Nobody asks for these rounds any more, nor for earlier ones."""
        self._known = {each: found for each, found in self._known.items() if each[2] > rounds.get(each[0], 0)}

    def _forget_first(self) -> None:
        for found in self._first:
            self._known.pop(found, None)
        self._first.clear()

    def close(self) -> None:
        """No life follows: drop all."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed, self._repeats = True, False
            self._known.clear()
            for journal, path in zip(self._journals.values(), self._paths, strict=True):
                journal.close()
                path.unlink(missing_ok=True)
