"""What a worker has contributed, so that its agent can let it leave the job if it dies (`--on-worker-loss leave`).

A tensor's slices go to one or several servers, one by one. If the worker dies in between, some servers have a slice and
may have closed its round, and others wait for theirs. So a worker keeps all slices of a contribution before it sends
the first one. After its death a process in its name (runtime/departure.py) sends what is missing, and then leaves. So a
contribution counts in all slices of a tensor or in none. One that is a single message needs no copy.

With no room left this ends with one warning: then the worker's death ends the job.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.state_notes import StateNotes, lack_of_room
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.net.wire import Header, decode_header, encode_header
from geomx_cli.ps.state_file import StateFile

__all__ = ["Message", "SentContributions"]

_FILE = "sent"
_DIGITS = 20
Message = tuple[Header, memoryview | None]
"""One slice of a contribution: its header before it is numbered, and its payload, None for one that abstains."""


class SentContributions:
    """The newest contribution to each key of several slices, and the last round. For one thread.

    directory: the folder of the process's state. warn: gets a warning when there is no room.
    """

    def __init__(self, directory: Path, warn: Callable[[str], object]) -> None:
        self._directory = directory
        self._contributions = StateNotes(directory).contributions
        self._warn = warn
        self._last = 0
        self._file: StateFile | None = None
        self._round: int | None = None  # the descriptor of a file with the last round
        try:
            self._file = StateFile(directory / _FILE)
        except OSError as error:
            self._end(error)
        except ValueError as error:
            raise self._unreadable(error) from error

    def keep(self, messages: Sequence[Message]) -> None:
        """Keep the messages of one contribution, before the first one is sent."""
        header = messages[0][0]
        try:
            self._note(header.round if header.weight else 0)
            if self._file is not None and len(messages) > 1:
                headers = [encode_header(each) for each, _ in messages]
                payloads = {
                    str(index): np.frombuffer(payload, np.uint8)
                    for index, (_, payload) in enumerate(messages)
                    if payload is not None
                }
                self._file.commit(str(header.key), headers, payloads)
        except OSError as error:
            self._end(error)

    def _note(self, round_: int) -> None:
        """A contribution to this round follows: from the first one on, this worker can leave."""
        if self._file is None or (self._round is not None and round_ <= self._last):
            return
        if self._round is None:
            self._round = os.open(self._contributions, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._last = round_
        os.pwrite(self._round, f"{round_:>{_DIGITS}}".encode(), 0)

    def load(self) -> Iterator[tuple[Header, Array | None]]:
        """The messages that an earlier life has kept. Raises InvalidSettings if the file is damaged."""
        try:
            for _, saved in self._file.load() if self._file is not None else ():
                for index, raw in enumerate(saved.fields):
                    yield decode_header(raw, 0), saved.arrays.get(str(index))
        except (ValueError, TypeError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> InvalidSettings:
        what = f"the contributions in {self._directory} cannot be read: {error!r}"
        return InvalidSettings(what, "launch the job again")

    def close(self) -> None:
        """Nothing follows."""
        if self._file is not None:
            self._file.close()
        if self._round is not None:
            os.close(self._round)
        self._file = self._round = None

    def _end(self, error: OSError) -> None:
        self.close()
        for path in (self._contributions, self._directory / _FILE):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        why = error.strerror or str(error)
        self._warn(lack_of_room(self._directory, why, "this worker dies", "--on-worker-loss end"))
