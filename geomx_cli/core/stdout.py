"""stdout of a command: what has become of it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

__all__ = ["Stdout", "watched"]


class Stdout:
    """A stream as it is, which remembers whether text was written to it (`used`) and the error that keeps more from
    being written (`broken`).
    """

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
        """Let what could not be written go nowhere, or Python tries again at its end and complains."""
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextmanager
def watched(stream: TextIO) -> Iterator[Stdout]:
    """`stream` as sys.stdout, watched; what is left to be written is written at the end, or `broken` says why not."""
    output = Stdout(stream)
    with redirect_stdout(cast(TextIO, output)):
        yield output
