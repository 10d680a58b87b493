"""How the curves of a figure are shown: scales, limits and a reference line."""

from dataclasses import dataclass

from geomx_cli.observe.report.figures import Curves

__all__ = ["Axes"]


@dataclass(frozen=True)
class Axes:
    """Limits are (low, high), None for those of the data. target: a horizontal line at this accuracy."""

    logx: bool = False
    logy: bool = False
    xlim: tuple[float, float] | None = None
    ylim: tuple[float, float] | None = None
    target: float | None = None

    def x_limits(self, figure: Curves) -> tuple[float, float]:
        """Return the limits of x: from 0, or on a logarithmic axis from the first point."""
        if self.xlim is not None:
            return self.xlim
        xs = [x for curve in figure.curves.values() for x in curve.x if x > 0 or not self.logx]
        low, high = (min(xs, default=1.0) if self.logx else 0.0), max(xs, default=1.0) or 1.0
        return low, high if high > low else low + 1.0

    def y_limits(self, figure: Curves) -> tuple[float, float]:
        """Return the limits of y: those of the points within the limits of x, with some room, and of the lines."""
        low_x, high_x = self.x_limits(figure)
        ys: list[float] = [level for level in (figure.level, self.target) if level is not None]
        for curve in figure.curves.values():
            sds = curve.sd or [0.0] * len(curve.y)
            within = [(y, sd) for x, y, sd in zip(curve.x, curve.y, sds, strict=True) if low_x <= x <= high_x]
            ys += [y + side * sd for y, sd in within for side in (-1, 1)]
        ys = [y for y in ys if y > 0] if self.logy else ys
        low, high = min(ys, default=0.1), max(ys, default=1.0)
        if self.logy:
            return self.ylim or (low / 1.2, high * 1.2)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
        return self.ylim or (max(low - room, 0.0) if low >= 0 else low - room, high + room)
