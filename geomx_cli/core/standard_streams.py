"""Wrappers around stdout and stderr. They drop text when no reader is left; stderr's wrapper drops all text that cannot
be written.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

__all__ = ["Stdout", "has_reader", "lossy_stderr", "watched"]


NO_READER = (errno.EPIPE, errno.EIO)
"""Errors of a pipe whose reader has ended, and of a terminal that was closed."""


class Stdout:
    """Delegates to a stream.

    used: whether text was written.
    lost: whether the stream no longer has a reader. Then text is dropped.
    broken: the last other error of writing.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.used = self.lost = False
        self.broken: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See TextIO.write."""
        with self._checked():
            self._stream.write(text)
        self.used = self.used or len(text) > 0
        return len(text)

    def flush(self) -> None:
        """See TextIO.flush."""
        with self._checked():
            self._stream.flush()

    def give_up(self) -> None:
        """Redirect the descriptor to /dev/null, so that Python's flush at exit does not fail."""
        _to_nowhere(self._stream)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in NO_READER:
                self.broken = error
                raise
            self.lost = True
            self.give_up()


class _LossyStderr:
    """Delegates to a stream, and drops text that the stream refuses. A closed terminal, a closed pipe or a full disk of
    a log must not end a job.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See TextIO.write."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """See TextIO.flush."""
        with suppress(OSError):
            self._stream.flush()


def _to_nowhere(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def has_reader() -> bool:
    """Whether stdout has a reader, as far as known."""
    return not getattr(sys.stdout, "lost", False)


@contextmanager
def watched(stream: TextIO) -> Iterator[Stdout]:
    """Replace sys.stdout by a wrapped `stream` for the block."""
    output = Stdout(stream)
    with redirect_stdout(cast(TextIO, output)):
        yield output


@contextmanager
def lossy_stderr() -> Iterator[None]:
    """Within the block, text that stderr refuses is dropped."""
    stream = sys.stderr
    with redirect_stderr(cast(TextIO, _LossyStderr(stream))):
        yield
    try:
        stream.flush()
    except OSError:
        _to_nowhere(stream)
