"""Live progress on stderr: a table in a terminal, plain lines elsewhere."""

import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TextIO

from geomx_cli.core.events import Event
from geomx_cli.core.options import Value
from geomx_cli.core.untrusted import plain
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.table import PartyTable, ProcessTable, awaited, sentence
from geomx_cli.jobs.view.waiting import SetStatus, ticking

__all__ = ["Observer", "LineView", "PlainView", "TableView", "View", "view_for"]


class Observer(Protocol):
    """Sees a job's events until the job ends or is detached. Called in the main thread; must not block."""

    def open(self, progress: Progress, options: Mapping[str, Value]) -> None:
        """Begin; `progress` is up to date whenever `on_event` is called, `options` has all of the job's. Raises
        GeomxError.
        """

    def on_event(self, process: str, event: Event) -> None:
        """Take an event of a process."""

    def close(self, status: str) -> None:
        """End; called also if `open` failed. status: see Outcome; "" for a job that did not start or was detached."""

_REFRESH = 0.25
_LINE_EVERY = 3.0
_WAITING_EVERY = 10.0
_SLOW = 2.0  # seconds before a wait is reported
_TRAINING = ("training", "evaluating")


Table = type[ProcessTable] | type[PartyTable]


class View(Protocol):
    """Displays progress and messages. Not thread-safe: used by one thread."""

    def note(self, text: str) -> None:
        """Print a message once."""

    def warn(self, text: str) -> None:
        """Print a warning, a notice of a long wait, or the answer to a signal: like `note`, but no view drops it."""

    def show(self, progress: Progress) -> None:
        """Update the display; called several times a second."""

    def waiting(self, text: str) -> AbstractContextManager[SetStatus]:
        """Within, report after 2 s what is being waited for; see waiting.ticking."""

    def suspended(self) -> AbstractContextManager[None]:
        """Within, leave the terminal to the shell."""

    def close(self) -> None:
        """Stop updating; printed text remains."""


def view_for(table: Table = ProcessTable) -> View:
    """Return a view that shows `table` if stderr is a terminal, else a plain one."""
    return TableView(sys.stderr, table) if sys.stderr.isatty() else PlainView(sys.stderr)


class PlainView:
    """Log lines: phase changes, evaluations, one line every few seconds while training, and what the job waits for
    if anything else takes long.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._evaluations = 0
        self._next_line = 0.0

    def note(self, text: str) -> None:
        """See View.note."""
        print(plain(text), file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        """See View.warn."""
        self.note(text)

    def show(self, progress: Progress) -> None:
        """See View.show."""
        now = time.monotonic()
        lines: list[tuple[float, str]] = []
        for when, found in progress.evaluations[self._evaluations :]:
            if found.accuracy is not None:
                lines.append((when, f"test accuracy {found.accuracy:.4f}"))
            if found.validation_loss is not None:
                lines.append((when, f"validation loss {found.validation_loss:.4f}"))
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._next_line = now + (_LINE_EVERY if self._phase in _TRAINING else _SLOW)
            lines.append((now, self._phase))  # after evaluations, which happened earlier
        for when, text in lines:
            self._note(when, progress, text)
        self._evaluations = len(progress.evaluations)
        if now < self._next_line:
            return
        if self._phase in _TRAINING:
            self._next_line = now + _LINE_EVERY
            self._note(now, progress, sentence(progress))
        else:
            self._next_line = now + _WAITING_EVERY
            if text := awaited(progress):
                self._note(now, progress, text if self._phase == "waiting" else f"{self._phase}, {text}")

    def _note(self, when: float, progress: Progress, text: str) -> None:
        self.note(f"{when - progress.began:7.1f} s  {text}")

    def waiting(self, text: str) -> AbstractContextManager[SetStatus]:
        """See View.waiting."""
        return ticking(text, self.note, _WAITING_EVERY)

    def suspended(self) -> AbstractContextManager[None]:
        """See View.suspended."""
        return nullcontext()

    def close(self) -> None:
        """See View.close."""


class LineView:
    """One of several jobs: a line that is rewritten in a terminal, and warnings. Elsewhere only warnings."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next = 0.0

    def note(self, text: str) -> None:
        """Do nothing: these messages are of little interest for one of many jobs."""

    def warn(self, text: str) -> None:
        """See View.warn."""
        self.close()
        print(plain(text), file=self._stream, flush=True)

    def show(self, progress: Progress) -> None:
        """See View.show."""
        now = time.monotonic()
        if self._stream.isatty() and now >= self._next:
            self._next = now + _REFRESH
            self._rewrite(sentence(progress))

    def waiting(self, text: str) -> AbstractContextManager[SetStatus]:
        """See View.waiting."""
        if self._stream.isatty():
            return ticking(text, self._rewrite, _REFRESH)
        return ticking(text, lambda line: print(plain(line), file=self._stream, flush=True), _WAITING_EVERY)

    def _rewrite(self, line: str) -> None:
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{plain(line)[:width]}", end="", file=self._stream, flush=True)

    def suspended(self) -> AbstractContextManager[None]:
        """See View.suspended."""
        return nullcontext()

    def close(self) -> None:
        """Erase the line."""
        if self._stream.isatty():
            print("\r\x1b[K", end="", file=self._stream, flush=True)


class TableView:
    """A table, updated in place."""

    def __init__(self, stream: TextIO, table: Table = ProcessTable) -> None:
        from rich.console import Console

        self._console = Console(file=stream)
        self._begin()
        self._table = table
        self._next = 0.0
        self._last: Progress | None = None

    def _begin(self) -> None:
        """Begin a table below what the terminal shows."""
        from rich.live import Live

        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._live.start()

    def note(self, text: str) -> None:
        """See View.note."""
        self._console.print(plain(text), markup=False, highlight=False, soft_wrap=True)  # can be copied

    def warn(self, text: str) -> None:
        """See View.warn."""
        self.note(text)

    def show(self, progress: Progress) -> None:
        """See View.show."""
        self._last = progress
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REFRESH
            self._live.update(self._table(progress, crop=True), refresh=True)

    @contextmanager
    def waiting(self, text: str) -> Iterator[SetStatus]:
        """See View.waiting."""
        from rich.text import Text

        def show(line: str) -> None:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

        try:
            with ticking(text, show, _REFRESH) as set_text:
                yield set_text
        finally:
            self._live.update(Text(""), refresh=True)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """See View.suspended."""
        self._live.stop()
        yield
        self._begin()  # not over what a shell has printed meanwhile

    def close(self) -> None:
        """See View.close."""
        if self._last is not None:
            self._live.update(self._table(self._last))  # stop() renders it
        self._live.stop()
