"""Live progress on stderr: a table in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TextIO

from geomx_cli.core.untrusted import plain
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.table import ProcessTable, sentence

__all__ = ["PlainView", "TableView", "View", "view_for"]

_REFRESH = 0.25
_LINE_EVERY = 3.0


class View(Protocol):
    """Displays progress and messages. Not thread-safe: used by one thread."""

    def note(self, text: str) -> None:
        """Print a message once."""

    def show(self, progress: Progress) -> None:
        """Update the display; called several times a second."""

    def suspended(self) -> AbstractContextManager[None]:
        """Within, leave the terminal to the shell."""

    def close(self) -> None:
        """Stop updating; printed text remains."""


def view_for() -> View:
    """Return a table view if stderr is a terminal, else a plain one."""
    return TableView(sys.stderr) if sys.stderr.isatty() else PlainView(sys.stderr)


class PlainView:
    """Log lines: phase changes, evaluations, and one line every few seconds while training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._evaluations = 0
        self._next_line = 0.0

    def note(self, text: str) -> None:
        """See View.note."""
        print(plain(text), file=self._stream, flush=True)

    def show(self, progress: Progress) -> None:
        """See View.show."""
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._next_line = now + _LINE_EVERY
            self.note(f"{now - progress.began:7.1f} s  {self._phase}")
        for accuracy in progress.evaluations[self._evaluations :]:
            self.note(f"{now - progress.began:7.1f} s  test accuracy {accuracy:.4f}")
        self._evaluations = len(progress.evaluations)
        if now >= self._next_line and self._phase in ("training", "evaluating"):
            self._next_line = now + _LINE_EVERY
            self.note(f"{now - progress.began:7.1f} s  {sentence(progress)}")

    def suspended(self) -> AbstractContextManager[None]:
        """See View.suspended."""
        return nullcontext()

    def close(self) -> None:
        """See View.close."""


class TableView:
    """A table with one row per process, and a progress bar for the job."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(file=stream)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()
        self._next = 0.0
        self._last: Progress | None = None

    def note(self, text: str) -> None:
        """See View.note."""
        self._console.print(plain(text), markup=False, highlight=False)

    def show(self, progress: Progress) -> None:
        """See View.show."""
        self._last = progress
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REFRESH
            self._live.update(ProcessTable(progress, crop=True), refresh=True)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """See View.suspended."""
        self._live.stop()
        yield
        self._live.start()

    def close(self) -> None:
        """See View.close."""
        if self._last is not None:
            self._live.update(ProcessTable(self._last))  # stop() renders it
        self._live.stop()
