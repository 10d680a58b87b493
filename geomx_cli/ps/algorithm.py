"""What a synchronisation algorithm does at a server, as the server sees it."""

from dataclasses import dataclass
from typing import Protocol

from geomx_cli.ps.optimizers import Optimizer
from geomx_cli.ps.wire import Array

__all__ = ["Answer", "Forward", "ServerPart", "Slot"]


@dataclass(slots=True)
class Slot:
    """One slice as an algorithm sees it: its key and index, the current value (None before init) and its version."""

    key: int
    index: int
    value: Array | None = None
    version: int = 0

    @property
    def id(self) -> tuple[int, int]:
        """(key, index): names the slice in an optimizer's state."""
        return (self.key, self.index)


@dataclass(frozen=True, slots=True)
class Forward:
    """Exchange `array` with the root; its result becomes the value."""

    array: Array


@dataclass(frozen=True, slots=True)
class Answer:
    """Make `array` the value and answer the members with it."""

    array: Array


class ServerPart(Protocol):
    """An algorithm's part in a server. Called by the server's loop only; arrays passed in must not be written to."""

    def at_party(self, slot: Slot, total: Array, weight: float) -> Forward | Answer:
        """A local server has its party's sum of one round."""

    def from_root(self, slot: Slot, result: Array) -> Array:
        """A local server has the root's result: the value to answer with."""

    def at_root(self, slot: Slot, total: Array, weight: float, optimizer: Optimizer | None) -> Array:
        """A root has the sum of one round: the new value."""

    def export_state(self) -> dict[str, Array]:
        """What the algorithm keeps between rounds, as named arrays."""

    def import_state(self, state: dict[str, Array]) -> None:
        """Take up exported state."""
