"""A job's progress for a terminal of any size: one row per process, a progress bar, and one summary line."""

import textwrap
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from geomx_cli.core.conventions import party_of
from geomx_cli.core.units import counted, format_bytes, format_duration
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.table import Table

__all__ = ["PartyTable", "PartyTotals", "ProcessTable", "awaited", "party_totals", "sentence", "up_down"]

# A job's progress by party: subtotals, as values and as a table.

_COLUMNS = ("party", "workers up", "samples/s", "WAN up/down", "slowest to compute")
_PARTY_GAP = 2


@dataclass(frozen=True)
class PartyTotals:
    """Subtotals of the processes of one party.

    workers: those that train; up: of these, how many run. samples_per_s: their current rate, 0 once all have finished
    or ended. wan: bytes sent and received across the WAN. slowest: the worker that computes the
    slowest, by its samples per second of the time that it does not wait for others; "" and 0 if unknown, or
    once all have finished.
    """

    party: str
    workers: int
    up: int
    samples_per_s: float
    wan: tuple[int, int]
    slowest: str
    slowest_samples_per_s: float

    def to_json(self) -> dict[str, Any]:
        """The fields, as in `geomx status --parties --json`."""
        slowest = {"process": self.slowest, "computes_samples_per_s": self.slowest_samples_per_s}
        return {
            "party": self.party,
            "workers": {"total": self.workers, "up": self.up},
            "samples_per_s": self.samples_per_s,
            "bytes": {"wan": list(self.wan)},
            "slowest": slowest if self.slowest else None,
        }


def party_totals(progress: Progress) -> list[PartyTotals]:
    """Return the subtotals of each party, in the plan's order."""
    parties: dict[str, list[ProcessState]] = {}
    for row in progress.rows.values():
        parties.setdefault(row.process.party, []).append(row)
    return [_totals(party, rows) for party, rows in parties.items()]


def _totals(party: str, rows: list[ProcessState]) -> PartyTotals:
    workers = [row for row in rows if row.trains]
    up = [row for row in workers if row.runs]
    rates = {row.process.name: rate for row in up if (rate := _compute_rate(row))}
    slowest = min(rates, key=rates.__getitem__, default="")
    return PartyTotals(
        party=party,
        workers=len(workers),
        up=len(up),
        samples_per_s=round(sum(row.current_rate for row in up), 1),
        wan=(sum(row.traffic.wan[0] for row in rows), sum(row.traffic.wan[1] for row in rows)),
        slowest=slowest,
        slowest_samples_per_s=round(rates.get(slowest, 0.0), 1),
    )


def _compute_rate(row: ProcessState) -> float:
    """Return a worker's samples per second of the time that it does not wait; 0 if unknown."""
    computing = 1.0 - (row.waiting or 0.0)
    return row.current_rate / max(computing, 0.001)


class PartyTable:
    """A rich renderable with one row per party. Omits the last columns in narrow terminals and, with `crop`, the last
    parties in low ones.
    """

    def __init__(self, progress: Progress, *, crop: bool = False) -> None:
        self._progress = progress
        self._crop = crop

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        """See rich's protocol."""
        from rich.table import Table
        from rich.text import Text

        words = textwrap.wrap(sentence(self._progress), options.max_width)
        parties = party_totals(self._progress)
        rows = [_party_cells(one) for one in parties]
        shown = len(rows)
        if self._crop:
            del words[max(1, options.size.height - 2) :]
            room = options.size.height - len(words) - 2  # without the header and the cursor
            if shown > room:
                shown = max(0, room - 1)
        number = _fitting(rows, options.max_width)
        table = Table("party", box=None, pad_edge=False, header_style="bold")
        for column in _COLUMNS[1:number]:
            table.add_column(column, justify="right", no_wrap=True)
        for one, row in zip(parties[:shown], rows, strict=False):
            failing = one.up < one.workers and not self._progress.over
            table.add_row(*row[:number], style="red" if failing else None)
        if shown:
            yield table
        if shown and shown < len(rows):
            yield Text(f"and {len(rows) - shown} more")
        yield Text("\n".join(words))


def _fitting(rows: Sequence[tuple[str, ...]], width: int) -> int:
    """Return how many of the columns fit, one at least."""
    widths = (max(map(len, cells)) + _PARTY_GAP for cells in zip(_COLUMNS, *rows, strict=True))
    return max(1, sum(total - _PARTY_GAP <= width for total in accumulate(widths)))


def _party_cells(one: PartyTotals) -> tuple[str, ...]:
    slowest = f"{one.slowest}, {one.slowest_samples_per_s:.0f} samples/s" if one.slowest else ""
    rate = f"{one.samples_per_s:.0f}" if one.samples_per_s else ""
    return one.party, f"{one.up}/{one.workers}", rate, up_down(one.wan), slowest


_BAR = 40
_GAP = 2
# Column -> minimum width, so that typical values do not change the layout.
_WIDTHS: Mapping[str, int] = {
    "process": 0, "state": 10, "restarts": 0, "round": 5, "step": 5, "samples/s": 9, "loss": 6, "accuracy": 8,
    "LAN up/down": 13, "WAN up/down": 13,
}  # fmt: skip
_LEFT_OUT_FIRST = ("LAN up/down", "accuracy", "loss", "samples/s", "WAN up/down", "round", "step", "restarts")
_METRICS = 3  # in the summary line


class ProcessTable:
    """A rich renderable. Omits columns in narrow terminals and, with `crop`, processes in low ones: those that
    made the job fail, then training ones, have priority.
    """

    def __init__(self, progress: Progress, *, crop: bool = False) -> None:
        self._progress = progress
        self._crop = crop

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType | Segment]":
        """See rich's protocol."""
        from rich.progress_bar import ProgressBar
        from rich.segment import Segment
        from rich.text import Text

        width = options.max_width
        words = textwrap.wrap(sentence(self._progress), width)
        rows = list(self._progress.rows.values())
        shown = rows
        if self._crop:
            del words[max(1, options.size.height - 2) :]
            # Reserve lines for the header, the bar and the cursor.
            shown = _most_wanted(rows, self._progress.failed_first, options.size.height - len(words) - 3)
        if shown:
            yield _table(shown, _columns(rows, width), self._progress.failed_first)
        if shown and len(shown) < len(rows):
            yield Text(f"and {len(rows) - len(shown)} more")
        if self._progress.done is not None:
            yield ProgressBar(total=1.0, completed=self._progress.done, width=min(_BAR, width))
            yield Segment.line()  # a bar does not end with a newline
        yield Text("\n".join(words))


def _table(rows: Sequence[ProcessState], columns: Sequence[str], failed_first: Collection[str]) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        justify = "left" if column in ("process", "state") else "right"
        table.add_column(column, justify=justify, no_wrap=True, min_width=_WIDTHS[column])  # type: ignore[arg-type]
    for row in rows:
        failed, cells = row.process.name in failed_first, _cells(row)
        if failed and row.status is not None:
            cells["state"] = "failed"
        table.add_row(*(cells[column] for column in columns), style="bold red" if failed else None)
    return table


def _columns(rows: Sequence[ProcessState], width: int) -> list[str]:
    """Return the columns that fit."""
    cells = [_cells(row) for row in rows]
    widths = {name: max(usual, len(name), *(len(cell[name]) for cell in cells)) for name, usual in _WIDTHS.items()}
    if all(row.step is None for row in rows):
        del widths["step"]  # only scripts report it
    if not any(row.restarts for row in rows):
        del widths["restarts"]
    for name in _LEFT_OUT_FIRST:
        if sum(widths.values()) + _GAP * (len(widths) - 1) > width:
            widths.pop(name, None)
    return list(widths)


def _most_wanted(rows: Sequence[ProcessState], failed_first: Collection[str], room: int) -> list[ProcessState]:
    """Return as many rows as fit, in order, leaving one line to count the others."""
    if len(rows) <= room:
        return list(rows)
    wanted = sorted(rows, key=lambda row: (row.process.name not in failed_first, not row.trains))[: max(0, room - 1)]
    names = {row.process.name for row in wanted}
    return [row for row in rows if row.process.name in names]


def _cells(row: ProcessState) -> dict[str, str]:
    return {
        "process": row.process.name,
        "state": row.state,
        "restarts": str(row.restarts or ""),
        "round": str(row.round or ""),
        "step": "" if row.step is None else str(row.step),
        "samples/s": f"{row.current_rate:.0f}" if row.current_rate else "",
        "loss": "" if row.loss is None else f"{row.loss:.3f}",
        "accuracy": "" if row.accuracy is None else f"{row.accuracy:.4f}",
        "LAN up/down": up_down(row.traffic.lan),
        "WAN up/down": up_down(row.traffic.wan),
    }


def up_down(counts: tuple[int, int]) -> str:
    """Return bytes sent and received as text, "" for none."""
    return "/".join(format_bytes(count) for count in counts).replace(" ", "") if any(counts) else ""


def sentence(progress: Progress) -> str:
    """Summarize the job in one line: "training 42 %, round 120, loss 0.513, accuracy 0.8121, 5120 samples/s, ...";
    before the first step, for how long and what it waits for.
    """
    totals = progress.totals()
    done = "" if progress.done is None else f" {progress.done:.0%}"
    parts = [f"{progress.phase}{done}", f"round {totals.rounds}"]
    if progress.phase in ("starting", "waiting"):
        parts = [f"{progress.phase} ({time.monotonic() - progress.began:.0f} s)"]
    if progress.phase in ("starting", "waiting", "training"):  # later the states of the processes tell
        parts += filter(None, [awaited(progress, names=False), _left_out(progress)])
    if totals.loss is not None:
        parts.append(f"loss {totals.loss:.3f}")
    if totals.accuracy is not None:
        parts.append(f"accuracy {totals.accuracy:.4f}")
    parts += [f"{name} {value:.4g}" for name, value in list(progress.metrics.items())[:_METRICS]]
    if progress.samples_per_s:
        parts.append(f"{progress.samples_per_s:.0f} samples/s")
    if any(totals.wan):
        parts.append(f"WAN {format_bytes(totals.wan[0])}")
    if progress.left_s and not progress.phase.startswith("stop"):
        parts.append(f"{format_duration(progress.left_s)} left")
    return ", ".join(parts)


def _left_out(progress: Progress) -> str:
    """Return the parties that are left out, as "without party B since 12:03:10 (34 rounds)"; "" for none."""
    told = [f"{party} {since}" for party, since in progress.left_out.items()]
    return f"without party {', '.join(told)}" if told else ""


# What a job waits for: before its first step, in a round, or at its end.

_MOST_NAMED = 4  # names in a line


def awaited(progress: Progress, *, names: bool = True) -> str:
    """Return it as "waiting for 2 of 8 processes to start: A/worker:0, A/worker:1"; "" while rounds follow one another.
    `names`: with those of the processes; those of a round that takes long are always told.
    """
    rows = list(progress.rows.values())
    phase = progress.phase
    if phase in ("starting", "waiting"):
        starting = [row for row in rows if row.status is None and row.state == "starting"]
        if starting:
            text = f"waiting for {len(starting)} of {counted(len(rows), 'process')} to start"
            return text + _names(starting, names=names)
        joining = [row for row in rows if row.status is None and row.state == "waiting"]
        text = "waiting for all to join and for the initial values"
        return text + _names(joining, names=names) if joining else ""
    known = any(row.round or row.samples or row.samples_per_s for row in rows)
    if phase == "training" and progress.first_step is None and not known:
        return "waiting for the first round"
    if phase in ("training", "evaluating") and (late := _late(progress)):
        return f"waiting for {late}"
    running = [row for row in rows if row.runs]
    if phase in ("stopping", "finished") and running:
        return f"waiting for {counted(len(running), 'process')} to end{_names(running, names=names)}"
    return ""


def _late(progress: Progress) -> str:
    """The workers for which servers wait. Roots name local servers. If such a local server names no worker, this means
    all workers of its party.
    """
    found: dict[str, None] = {}
    told = [row for row in progress.rows.values() if row.awaited and row.status is None]
    for name in (name for row in told for name in row.awaited.split(", ")):
        row = progress.rows.get(name)
        if row is None or row.process.role == "worker":
            found[name] = None
        elif not row.awaited:
            found |= {one.process.name: None for one in progress.training_rows if one.process.party == party_of(name)}
    return _shortened(list(found))


def _names(rows: Sequence[ProcessState], *, names: bool) -> str:
    return f": {_shortened([row.process.name for row in rows])}" if names else ""


def _shortened(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
