"""What a person sees of a running job, on stderr: a table that lives in a terminal, plain lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

from geomx_cli.progress import Progress, Row
from geomx_cli.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["PlainView", "TableView", "View", "sentence", "table", "view_for"]

_REFRESH = 0.25
_LINE_EVERY = 3.0
_BAR = 40


class View(Protocol):
    """Shows progress and says what happens. Used by one thread."""

    def note(self, text: str) -> None:
        """Say something once."""

    def show(self, progress: Progress) -> None:
        """The progress may have changed; called several times a second."""

    def close(self) -> None:
        """Show nothing more; what was said stays."""


def view_for(stream: TextIO = sys.stderr) -> View:
    """The table where `stream` is a terminal, lines where it is not."""
    return TableView(stream) if stream.isatty() else PlainView(stream)


class PlainView:
    """Lines for a log: changes of phase, evaluations, and one line every few seconds while training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._phase = ""
        self._evaluations = 0
        self._next_line = 0.0

    def note(self, text: str) -> None:
        """See View.note."""
        print(text, file=self._stream, flush=True)

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

    def close(self) -> None:
        """See View.close."""


class TableView:
    """A table with one row for each process, and a bar for the whole job."""

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
        self._console.print(text, markup=False, highlight=False)

    def show(self, progress: Progress) -> None:
        """See View.show."""
        self._last = progress
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _REFRESH
            self._live.update(table(progress), refresh=True)

    def close(self) -> None:
        """See View.close."""
        if self._last is not None:
            self._live.update(table(self._last), refresh=True)
        self._live.stop()


def table(progress: Progress) -> "RenderableType":
    """One row for each process, a bar and a line for the whole job."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("party", "role", "state"):
        rows.add_column(title, no_wrap=True)
    for title in ("round", "samples/s", "loss", "accuracy", "LAN up/down", "WAN up/down"):
        rows.add_column(title, justify="right", no_wrap=True)
    for row in progress.rows.values():
        rows.add_row(*_cells(row), style="red" if row.status and not row.asked else None)
    bar = ProgressBar(total=1.0, completed=progress.done, width=_BAR)
    return Group(rows, bar, Text(sentence(progress)))


def _cells(row: Row) -> list[str]:
    process = row.process
    role = f"{process.role.replace('_', ' ')} {process.rank}"
    return [
        process.party,
        role,
        row.state,
        str(row.round or ""),
        f"{row.samples_per_s:.0f}" if row.samples_per_s else "",
        "" if row.loss is None else f"{row.loss:.3f}",
        "" if row.accuracy is None else f"{row.accuracy:.4f}",
        _up_down(row.lan),
        _up_down(row.wan),
    ]


def _up_down(counted: tuple[int, int]) -> str:
    return f"{format_bytes(counted[0])} / {format_bytes(counted[1])}" if any(counted) else ""


def sentence(progress: Progress) -> str:
    """The whole job in one line: "training 42 %, round 120, loss 0.513, accuracy 0.8121, 5120 samples/s,
    ...".
    """
    totals = progress.totals()
    parts = [f"{progress.phase} {progress.done:.0%}", f"round {totals.rounds}"]
    if totals.loss is not None:
        parts.append(f"loss {totals.loss:.3f}")
    if totals.accuracy is not None:
        parts.append(f"accuracy {totals.accuracy:.4f}")
    if progress.samples_per_s:
        parts.append(f"{progress.samples_per_s:.0f} samples/s")
    if any(totals.wan):
        parts.append(f"WAN {format_bytes(totals.wan[0])}")
    if progress.left_s:
        parts.append(f"{format_duration(progress.left_s)} left")
    return ", ".join(parts)
