"""The server's interface to a synchronisation algorithm."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from geomx_cli.ps.arrays import Array, Arrays, SliceArrays
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.net.payload import Content, Rows
from geomx_cli.ps.optim.optimizers import Optimizer

__all__ = ["Aggregate", "PushUp", "ReplyNow", "RowAlgorithm", "ServerAlgorithm", "SliceView", "Sum"]


@dataclass(slots=True, eq=False, kw_only=True)
class SliceView(SliceArrays):
    """One slice as an algorithm sees it.

    key, index: which slice it is.
    value: the current value; None before `init`.
    version: the number of updates by the roots, as far as this server knows.
    """

    key: int
    index: int
    value: Array | None = None
    version: int = 0

    @property
    def state(self) -> Arrays:
        """The algorithm's own arrays for this slice, by name."""
        return self.part("algorithm")

    @property
    def optimizer_state(self) -> Arrays:
        """The optimizer's arrays for this slice: the first argument of Optimizer.update."""
        return self.part("optimizer")


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The sum of the contributions to a slice in one round: fp32, or fp64 for fp64 slices; read-only.

    weight: the sum of their weights; 0 if all members abstained, and then the array is zeros. member: the contributing
    member if contributions are handled separately, else 0.
    """

    array: Array
    weight: float
    member: int = 0


@dataclass(frozen=True, slots=True)
class PushUp:
    """Exchange `array` with the root under this weight; the result becomes the value. With weight 0 the array is
    neither counted nor sent.
    """

    array: Array
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class ReplyNow:
    """Make `array` the value and answer the members with it."""

    array: Array


class ServerAlgorithm(Protocol):
    """The server side of an algorithm. Called in the server's loop only.

    asynchronous: whether a root handles each member's contribution (a party's; in a flat cluster a worker's)
    separately, on arrival. max_staleness: how many rounds a member may then be ahead of the slowest; -1 for no limit.
    starts_from_value: whether a local server needs the initial value before it closes its first round.
    """

    asynchronous: bool
    max_staleness: int
    starts_from_value: bool

    def aggregate_local(self, slot: SliceView, total: Aggregate) -> PushUp | ReplyNow:
        """At a local server: decide on the party's sum of one round."""

    def on_global(self, slot: SliceView, result: Array) -> Array:
        """At a local server: convert the root's result to the value for the members."""

    def aggregate_global(self, slot: SliceView, total: Aggregate, optimizer: Optimizer | None) -> Array:
        """At a root: compute the new value from a round's sum. Raises InvalidSettings if that is impossible."""

    def on_request(self, topic: str, body: Body, is_root: bool) -> Body | None:
        """Answer a worker's request with a topic of this algorithm; None forwards it to the rank-0 root."""


@runtime_checkable
class RowAlgorithm(ServerAlgorithm, Protocol):
    """An algorithm that, if `takes_rows` is set, accepts the sum of a round as rows when only rows were contributed.

    A local server then forwards its party's sum and applies the root's result without calling the algorithm. All other
    algorithms get the dense sum.
    """

    takes_rows: bool

    def rows_at_root(
        self, slot: SliceView, total: Rows, weight: float, member: int, optimizer: Optimizer | None
    ) -> Content | None:
        """At a root that has a value: handle the sum of one round's rows; weight and member as in Aggregate.

        Returns the changed rows of the value, or a whole new value, or None for no update. Raises as `aggregate_global`
        does.
        """


class Sum:
    """The sum of all members' contributions, without any state: for bytes, of which there is no mean and no step."""

    asynchronous = False
    max_staleness = -1
    starts_from_value = False

    def aggregate_local(self, slot: SliceView, total: Aggregate) -> PushUp:
        """See ServerAlgorithm."""
        return PushUp(total.array, total.weight)

    def on_global(self, slot: SliceView, result: Array) -> Array:
        """See ServerAlgorithm."""
        return result

    def aggregate_global(self, slot: SliceView, total: Aggregate, optimizer: Optimizer | None) -> Array:
        """See ServerAlgorithm."""
        return total.array

    def on_request(self, topic: str, body: Body, is_root: bool) -> None:
        """See ServerAlgorithm."""
