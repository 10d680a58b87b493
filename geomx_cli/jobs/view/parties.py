"""A job's progress by party: subtotals, as values and as a table."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.jobs.view.table import sentence, up_down

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

__all__ = ["PartyTable", "PartyTotals", "party_totals"]


_COLUMNS = ("party", "workers up", "samples/s", "WAN up/down", "slowest to compute")
_GAP = 2


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
        rows = [_cells(one) for one in parties]
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
    widths = (max(map(len, cells)) + _GAP for cells in zip(_COLUMNS, *rows, strict=True))
    return max(1, sum(total - _GAP <= width for total in accumulate(widths)))


def _cells(one: PartyTotals) -> tuple[str, ...]:
    slowest = f"{one.slowest}, {one.slowest_samples_per_s:.0f} samples/s" if one.slowest else ""
    rate = f"{one.samples_per_s:.0f}" if one.samples_per_s else ""
    return one.party, f"{one.up}/{one.workers}", rate, up_down(one.wan), slowest
