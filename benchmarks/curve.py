"""Draws accuracy over training time, one curve for each system, as an SVG that follows the reader's light or dark mode.

    python benchmarks/publish.py accuracy                                  measures (root)
    python benchmarks/curve.py                                             draws docs/results/measured/accuracy.json
    python benchmarks/time_to_accuracy.py --curve --json > curve.json      measures other rows (root)
    python benchmarks/curve.py curve.json --to curve.svg

Time has a logarithmic axis. A row of the file has a name and a curve, [seconds, accuracy] of the global model. Points
below LEAST are left out; a curve of few points shows each of them.
"""

import argparse
import html
import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 66, 150, 18, 48
FEW = 8
LEAST = 0.6
TITLES = {"mxnet": "MXNet dist_sync", "default": "fsa", "diloco-sparseloco": "diloco+sparseloco"}
COLOURS = (("#c2410c", "#fb8b4f"), ("#1f5f9f", "#6cb0f2"), ("#0f766e", "#4fd1c5"), ("#7c3aed", "#b794f6"),
           ("#a16207", "#e3b341"), ("#be185d", "#f687b3"), ("#475569", "#a4b1bf"))  # fmt: skip
"""For light and for dark ground."""
Point = tuple[float, float]


class Axes:
    """Maps seconds and accuracies to the drawing."""

    def __init__(self, curves: Sequence[Sequence[Point]]) -> None:
        seconds = [point[0] for curve in curves for point in curve]
        accuracies = [point[1] for curve in curves for point in curve]
        self.first, self.last = min(seconds) / 1.25, max(seconds) * 1.25
        self.low, self.high = math.floor(min(accuracies) * 50) / 50, math.ceil(max(accuracies) * 50) / 50

    def place(self, point: Point) -> Point:
        """The place of [seconds, accuracy]."""
        across = math.log(point[0] / self.first) / math.log(self.last / self.first)
        up = (point[1] - self.low) / (self.high - self.low)
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    def lines(self) -> Iterator[str]:
        """The grid with its numbers."""
        for power in range(math.floor(math.log10(self.first)), math.ceil(math.log10(self.last)) + 1):
            for seconds in (10.0**power, 2 * 10.0**power, 5 * 10.0**power):
                if self.first <= seconds <= self.last:
                    x, _ = self.place((seconds, self.low))
                    yield f'<path class="grid" d="M{x:.1f} {TOP} V{HEIGHT - BOTTOM}"/>'
                    yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{seconds:g}</text>'
        for step in range(round((self.high - self.low) * 50) + 1):
            accuracy = self.low + step / 50
            _, y = self.place((self.first, accuracy))
            yield f'<path class="grid" d="M{LEFT} {y:.1f} H{WIDTH - RIGHT}"/>'
            yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{accuracy:.2f}</text>'
        middle = (LEFT + WIDTH - RIGHT) / 2
        yield f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">seconds of training (logarithmic)</text>'
        turned = f'transform="rotate(-90 14 {HEIGHT / 2})"'
        yield f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" {turned}>test accuracy</text>'


def drawing(rows: Sequence[Any]) -> str:
    """The SVG of rows with `name` and `curve`."""
    curves = [[(float(seconds), float(accuracy)) for seconds, accuracy in row["curve"]
               if seconds > 0 and accuracy >= LEAST] for row in rows]  # fmt: skip
    axes = Axes(curves)
    dark = "".join(f".c{index} {{ --c: {colours[1]} }} " for index, colours in enumerate(COLOURS))
    light = "".join(f".c{index} {{ --c: {colours[0]} }} " for index, colours in enumerate(COLOURS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
        ' role="img" aria-label="Test accuracy over seconds of training, by system" font-size="13"'
        " font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
        f"<style>.ground {{ fill: #ffffff }} text {{ fill: #1c2733 }} .grid {{ stroke: #dde3ea; fill: none }} {light}"
        ".line { stroke: var(--c); fill: none; stroke-width: 2 } .dot, .name { fill: var(--c) }"
        " .name { font-weight: 600 }"
        " @media (prefers-color-scheme: dark) { .ground { fill: #0d1117 } text { fill: #e6edf3 }"
        f" .grid {{ stroke: #2b3440 }} {dark}.name {{ fill: var(--c) }} }}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        *axes.lines(),
    ]
    ends = [axes.place(curve[-1]) for curve in curves]
    names = dict(zip(range(len(rows)), _apart([y for _, y in ends]), strict=True))
    for index, (row, curve) in enumerate(zip(rows, curves, strict=True)):
        colour = f"c{index % len(COLOURS)}"
        places = [axes.place(point) for point in curve]
        path = " L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path class="line {colour}" d="M{path}"/>')
        if len(places) <= FEW:
            parts += [f'<circle class="dot {colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in places]
        (x, end), y, name = ends[index], names[index], html.escape(TITLES.get(row["name"], row["name"]))
        parts.append(f'<path class="grid" d="M{x + 6:.1f} {end:.1f} L{WIDTH - RIGHT + 4} {y:.1f}"/>')
        parts.append(f'<text class="name {colour}" x="{WIDTH - RIGHT + 8}" y="{y + 4:.1f}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _apart(heights: Sequence[float], least: float = 18.0) -> list[float]:
    """The heights, moved so that texts at them do not overlap, in their order."""
    found = list(heights)
    order = sorted(range(len(found)), key=lambda index: (found[index], index))
    for before, index in pairwise(order):
        found[index] = max(found[index], found[before] + least)
    beyond = max(0.0, found[order[-1]] - (HEIGHT - BOTTOM)) if order else 0.0
    return [height - beyond for height in found]


def main() -> None:
    """Draw the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=DOCS / "results" / "measured" / "accuracy.json")
    parser.add_argument("--to", type=Path, default=DOCS / "figures" / "time-to-accuracy.svg", help="the SVG file")
    arguments = parser.parse_args()
    found = json.loads(arguments.results.read_text())["results"]
    commands = found if isinstance(found[0], list) else [found]
    arguments.to.write_text(drawing([row for rows in commands for row in rows]))


if __name__ == "__main__":
    main()
