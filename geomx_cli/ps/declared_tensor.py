"""A tensor that a worker has declared: its rounds, and checks of what a script gives for it."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.partition import Placement
from geomx_cli.ps.net.payload import Content, Rows
from geomx_cli.ps.net.wire import EVERY
from geomx_cli.ps.operation_queue import PendingExchange

__all__ = ["MAX_OPEN", "DeclaredTensor"]

MAX_OPEN = 4096
"""Rounds of one key that may be begun and without a result."""


@dataclass(slots=True)
class DeclaredTensor:
    """A tensor of this worker, with its rounds.

    round: the last one begun. pulls: the number of those sent to the servers. newest: the exchange or pull begun
    last, None before any.

    All checks raise InvalidSettings.
    """

    placement: Placement
    round: int = 0
    pulls: int = 0
    newest: PendingExchange | None = None
    _open: deque[PendingExchange] = field(default_factory=deque)  # the latest one, and earlier ones without a result

    @property
    def versions(self) -> tuple[int, int]:
        """Lowest and highest version at the roots among the slices of the newest exchange or pull; (-1, -1) before any.
        """
        return (-1, -1) if self.newest is None else (self.newest.lowest, self.newest.highest)

    @property
    def latest(self) -> PendingExchange | None:
        """The exchange begun last, None before any."""
        return self._open[-1] if self._open else None

    def add_exchange(self, exchange: PendingExchange) -> None:
        """This exchange of the next round has begun."""
        self._open.append(exchange)
        self.newest = exchange
        self._forget_done()  # free the previous result's memory before the next one is allocated

    def add_pull(self, pull: PendingExchange) -> None:
        """This pull from the servers has begun."""
        self.pulls += 1
        self.newest = pull

    def go_on(self, round_: int, pulls: int, lowest: int, highest: int) -> None:
        """Go on after so many rounds and pulls. The servers have the last result, of these versions."""
        self.round, self.pulls = round_, pulls
        done = PendingExchange(None, 0, lowest=lowest, highest=highest, holds=False)
        for future in (done.sent, done.done):
            future.set_result(None)
        self.newest = done
        self._open = deque([done] if round_ else [])

    def check_open(self) -> None:
        """Check that another round may begin, as fewer than MAX_OPEN have no result yet."""
        self._forget_done()
        if len(self._open) >= MAX_OPEN:
            raise InvalidSettings(
                f"{len(self._open)} rounds of key {self.placement.tensor.name!r} have no result yet",
                "wait for some of them before the next",
            )

    def check_contributor(self, rank: int) -> None:
        """Check that the worker of this rank in its party contributes to this tensor."""
        tensor = self.placement.tensor
        if tensor.shard not in (EVERY, rank):
            what = f"key {tensor.name!r} is contributed by worker {tensor.shard} of each party"
            raise InvalidSettings(what, f"this one is worker {rank}: it may pull the key")

    def check(self, array: Array) -> None:
        """Check that an array has this tensor's size and dtype, and one dimension."""
        tensor = self.placement.tensor
        if array.shape != (tensor.size,) or array.dtype != tensor.dtype:
            shape = f"shape {array.shape}" if array.ndim != 1 else f"{array.size}"
            raise InvalidSettings(
                f"key {tensor.name!r} has {tensor.size} elements of {tensor.dtype}, not {shape} of {array.dtype}",
                "give one-dimensional arrays; size and dtype of a key never change",
            )

    def check_numbers(self, numbers: Array) -> None:
        """Check that the tensor has rows of these numbers, and that they increase."""
        tensor = self.placement.tensor
        last = tensor.size // tensor.row - 1
        if numbers.ndim != 1 or not (numbers[1:] > numbers[:-1]).all():
            raise InvalidSettings(f"row numbers of key {tensor.name!r} that do not increase", "sort them, each once")
        if len(numbers) and not 0 <= numbers[0] <= numbers[-1] <= last:
            raise InvalidSettings(f"row numbers of key {tensor.name!r} that are not from 0 to {last}")

    def contribution(self, src: Content | None, out: Array | None) -> Content | None:
        """Check both, and return `src` as it is sent: contiguous, and dense if no slice has whole rows."""
        if isinstance(src, Rows):
            if out is not None:
                what = f"key {self.placement.tensor.name!r}: the result of a round of rows comes to no array"
                raise InvalidSettings(what, "pull it")
            self._check_rows(src)
            return src if self.placement.row else src.dense(self.placement.tensor.size)
        for array in (src, out):
            if array is not None:
                self.check(array)
        return None if src is None else np.ascontiguousarray(src)

    def _check_rows(self, rows: Rows) -> None:
        tensor = self.placement.tensor
        if (rows.row, str(rows.values.dtype), len(rows.values)) != (tensor.row, tensor.dtype, len(rows.numbers)):
            raise InvalidSettings(
                f"key {tensor.name!r} has rows of {tensor.row} {tensor.dtype}, not {rows.row} {rows.values.dtype}",
                "give a row for each number; the shape and dtype of a key never change",
            )
        self.check_numbers(rows.numbers)

    def _forget_done(self) -> None:
        """Drop the finished exchanges, except the latest."""
        while len(self._open) > 1 and self._open[0].done.done():
            self._open.popleft()
