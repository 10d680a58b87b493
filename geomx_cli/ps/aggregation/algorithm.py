"""What a synchronisation algorithm does at a server, as the server sees it."""

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from geomx_cli.ps.net.payload import Array, Content
from geomx_cli.ps.net.rows import Rows
from geomx_cli.ps.optim.optimizers import Optimizer

__all__ = ["Aggregate", "PushUp", "ReplyNow", "RowAlgorithm", "ServerAlgorithm", "SliceView"]

Body = dict[str, Any]


@dataclass(slots=True)
class SliceView:
    """One slice as an algorithm sees it: its key and index, the current value (None before init) and its version.

    version: how often the roots have made a new value of it, as far as this server knows. `kept` is the algorithm's own
    place for arrays that belong to this slice, by name.
    """

    key: int
    index: int
    value: Array | None = None
    version: int = 0
    kept: dict[str, Array] = field(default_factory=dict)

    @property
    def id(self) -> tuple[int, int]:
        """(key, index): names the slice in an optimizer's state."""
        return (self.key, self.index)


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The sum of what members gave to a slice in one round: fp32, or fp64 for fp64 slices; not to be written to.

    weight: the sum of their weights; 0 where all abstain, and then the array is zeros. member: whose it is, where each
    member's contribution counts alone, else 0.
    """

    array: Array
    weight: float
    member: int = 0


@dataclass(frozen=True, slots=True)
class PushUp:
    """Exchange `array` with the root, with this weight; its result becomes the value. With weight 0 the array does not
    count, and is not sent.
    """

    array: Array
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplyNow:
    """Make `array` the value and answer the members with it."""

    array: Array


class ServerAlgorithm(Protocol):
    """An algorithm's part in a server. Called by the server's loop only.

    asynchronous: whether a root takes each member's contribution (a party's; in a flat cluster a worker's) by itself,
    as it comes. max_staleness: by how many rounds one may then be ahead of the slowest; -1 for any number.
    starts_from_value: whether a local server needs the initial value before it closes its first round.
    """

    asynchronous: bool
    max_staleness: int
    starts_from_value: bool

    def aggregate_local(self, slot: SliceView, total: Aggregate) -> PushUp | ReplyNow:
        """A local server has its party's sum of one round."""

    def on_global(self, slot: SliceView, result: Array) -> Array:
        """A local server has the root's result: the value to answer with."""

    def aggregate_global(self, slot: SliceView, total: Aggregate, optimizer: Optimizer | None) -> Array:
        """A root has the sum of one round: the new value. Raises InvalidSettings where it cannot make one."""

    def on_request(self, topic: str, body: Body, is_root: bool) -> Body | None:
        """Answer a worker's request of a topic of this algorithm's; None passes it on to the rank-0 root."""


@runtime_checkable
class RowAlgorithm(ServerAlgorithm, Protocol):
    """One that can do with the rows of a round that has only rows in it, if it `takes_rows`.

    A local server then forwards its party's sum, and takes the root's result, without asking the algorithm. All others
    get the sum as a dense array.
    """

    takes_rows: bool

    def rows_at_root(
        self, slot: SliceView, total: Rows, weight: float, member: int, optimizer: Optimizer | None
    ) -> Content | None:
        """A root that has a value has the sum of one round's rows; weight and member are those of a Total.

        Returns the rows of the value that change, or all of the new value, or None if there is no update. Raises as
        `aggregate_global` does.
        """
