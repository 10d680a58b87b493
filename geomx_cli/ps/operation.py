"""An operation on a tensor, as a client's thread gives it to the worker's loop."""

from dataclasses import dataclass, field

import numpy as np

from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.partition import Placement, Slice
from geomx_cli.ps.net.payload import Content
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.net.wire import Kind, Reply
from geomx_cli.ps.pending_exchange import PendingExchange

__all__ = ["Operation"]


@dataclass(slots=True, eq=False)
class Operation:
    """A PUSH, OFFER, PULL or EXCHANGE of `src` (1-D, contiguous, or rows). `pending` receives the result, in `out` if
    given.

    round: of an EXCHANGE; of a PULL the last one that this worker has begun. reply: see wire.Reply. numbers: the rows
    requested by a PULL, None for all elements. in_turn: a PULL is sent after the result of its round has arrived and
    before the next round. by_digest: `src` are initial values that others may have: a PUSH may send their digest
    instead, and a PULL needs the servers' values only if they differ. pieces: the slices concerned, by index, each with
    its rows to send or request.
    """

    kind: Kind
    placement: Placement
    src: Content | None = None
    out: Array | None = None
    round: int = 0
    weight: float = 0.0
    priority: int = 0
    hyper: dict[str, float] = field(default_factory=dict)
    reply: Reply = Reply.FULL
    numbers: Array | None = None
    in_turn: bool = False
    by_digest: bool = False
    pieces: list[tuple[int, Slice, Rows | None]] = field(init=False)
    pending: PendingExchange = field(init=False)

    def __post_init__(self) -> None:
        self.pieces = self._cut()
        self.pending = PendingExchange(self.out, len(self.pieces), holds=self.reply == Reply.FULL)

    def _cut(self) -> list[tuple[int, Slice, Rows | None]]:
        placement, rows = self.placement, self.src if isinstance(self.src, Rows) else None
        if self.numbers is not None:
            rows = Rows(self.numbers, np.empty((len(self.numbers), 0)))
        if rows is None:
            return [(index, piece, None) for index, piece in enumerate(placement.slices)]
        cut = [rows.cut(piece.offset // placement.row, piece.end // placement.row) for piece in placement.slices]
        found = zip(range(len(cut)), placement.slices, cut, strict=True)
        return [item for item in found if self.numbers is None or len(item[2])]
