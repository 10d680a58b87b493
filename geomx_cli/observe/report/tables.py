"""The data of figures as CSV files."""

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.errors import CheckFailed
from geomx_cli.observe.report.figures import Bars, Curves, Figure, Matrix, Timeline

__all__ = ["write_csv", "write_figure"]

Row = Sequence[Any]


def write_figure(figure: Figure, folder: Path) -> Path:
    """Write a figure's data to `folder`/NAME.csv; return the path. Raises as write_csv."""
    path = folder / f"{figure.name}.csv"
    write_csv(path, list(_rows(figure)))
    return path


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """Write rows, the first of which is the heading; None becomes an empty field. Raises CheckFailed on failure."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.getvalue().encode())
    except OSError as error:
        raise CheckFailed(f"cannot write {path}: {error.strerror}", "free space or fix permissions") from None


def _rows(figure: Figure) -> Iterator[Row]:
    match figure:
        case Curves():
            yield "series", figure.x, figure.y, "sd", "n"
            for series, curve in figure.curves.items():
                for place, x in enumerate(curve.x):
                    yield series.label, x, curve.y[place], curve.sd[place] if curve.sd else None, curve.n
        case Bars():
            yield "series", "worker", figure.y, "sd", "n"
            for series, bars in figure.bars.items():
                yield from ((series.label, name, mean.value, mean.sd, mean.n) for name, mean in bars)
        case Timeline():
            yield "worker", "phase", "begin (seconds)", "end (seconds)"
            for worker, spans in figure.workers.items():
                yield from ((worker, span.phase, span.begin, span.end) for span in spans)
        case Matrix():
            yield "from", "to", "megabytes"
            for sender, row in zip(figure.parties, figure.megabytes, strict=True):
                for receiver, value in zip(figure.parties, row, strict=True):
                    if receiver != sender:
                        yield sender, receiver, value
