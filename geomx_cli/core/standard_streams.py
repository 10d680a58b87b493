"""Wrappers around stdout and stderr: stdout's records writes and errors, stderr's drops what cannot be written."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

__all__ = ["Stdout", "lossy_stderr", "watched"]


class Stdout:
    """Delegates to a stream; records whether text was written (`used`) and the last write error (`broken`)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.used = False
        self.broken: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """See TextIO.write."""
        try:
            written = self._stream.write(text)
        except OSError as error:
            self.broken = error
            raise
        self.used = self.used or written > 0
        return written

    def flush(self) -> None:
        """See TextIO.flush."""
        try:
            self._stream.flush()
        except OSError as error:
            self.broken = error
            raise

    def give_up(self) -> None:
        """Redirect the descriptor to /dev/null, so that Python's flush at exit does not fail."""
        _to_nowhere(self._stream)


class _LossyStderr:
    """Delegates to a stream, and drops what it refuses: a closed terminal, a closed pipe or a full disk of a log must
    not end a job.
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


@contextmanager
def watched(stream: TextIO) -> Iterator[Stdout]:
    """Replace sys.stdout by a wrapped `stream` for the block."""
    output = Stdout(stream)
    with redirect_stdout(cast(TextIO, output)):
        yield output


@contextmanager
def lossy_stderr() -> Iterator[None]:
    """Within, what stderr refuses is dropped."""
    stream = sys.stderr
    with redirect_stderr(cast(TextIO, _LossyStderr(stream))):
        yield
    try:
        stream.flush()
    except OSError:
        _to_nowhere(stream)
