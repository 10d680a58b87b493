"""One worker's exchange of one tensor: slices are sent up, and their results are gathered in one array."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.ps.arrays import Array

__all__ = ["PendingExchange"]


@dataclass(slots=True, eq=False)
class PendingExchange:
    """`sent`: the source may be reused. `done`: the result is complete, in `out` if given.

    Both futures may be used in any thread; a failure of the job is set on both. Without `out` the result's slices are
    kept as received, for `copy_to`. `lowest` and `highest`: versions of the slices at the roots; they differ if parties
    train asynchronously. holds: whether the result is or will be stored here; that of a round of rows is not.
    """

    out: Array | None
    missing: int  # slices
    sent: "Future[None]" = field(default_factory=Future)
    done: "Future[None]" = field(default_factory=Future)
    contributors: tuple[int, ...] = ()
    weight: float = 0.0
    lowest: int = -1
    highest: int = -1
    holds: bool = True
    started: float = field(default_factory=time.monotonic)
    _kept: list[tuple[int, Array]] = field(default_factory=list)

    def age(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.started

    def take(self, offset: int, array: Array, version: int) -> None:
        """Take a slice's result; `array` stays valid as long as it is held."""
        self.lowest = version if self.lowest < 0 else min(self.lowest, version)
        self.highest = max(self.highest, version)
        if self.out is not None:
            np.copyto(self.out[offset : offset + len(array)], array)
        else:
            self._kept.append((offset, array))
        self.missing -= 1
        if self.missing == 0:
            self.sent.set_result(None)
            self.done.set_result(None)

    def copy_to(self, out: Array) -> None:
        """Copy the complete result to a 1-D array, which may be `out` itself; any thread, after `done`."""
        if self.out is not None and self.out.ctypes.data != out.ctypes.data:
            np.copyto(out, self.out)
        for offset, array in self._kept:
            np.copyto(out[offset : offset + len(array)], array)

    def release(self) -> None:
        """Free the result's memory; a later pull gets it from the servers."""
        self.holds = False
        self._kept.clear()

    def fail(self, error: Exception) -> None:
        """Fail the pending futures."""
        for future in (self.sent, self.done):
            if not future.done():
                future.set_exception(error)
