"""FSA, fully synchronous: every worker's gradient counts in every round, and all continue from the same result.

Workers push gradients; a local server sums its party's and exchanges the sum with the roots; a root sums the parties'
and either lets the optimizer update the weights, or without one answers with the sum itself. One WAN round trip a round.
"""

from typing import TYPE_CHECKING

from geomx_cli.options import Option

if TYPE_CHECKING:
    from geomx_cli.ps.algorithm import Forward, ServerPart, Slot
    from geomx_cli.ps.config import NodeSettings
    from geomx_cli.ps.optimizers import Optimizer
    from geomx_cli.ps.wire import Array

name = "fsa"
options: tuple[Option, ...] = ()


def refuses(spec: object) -> str | None:
    """Works with everything."""
    return None


def server(settings: "NodeSettings") -> "ServerPart":
    """The part in a server."""
    return FsaServer()


class FsaServer:
    """Keeps nothing between rounds."""

    def at_party(self, slot: "Slot", total: "Array", weight: float) -> "Forward":
        """The party's sum goes to the roots."""
        from geomx_cli.ps.algorithm import Forward

        return Forward(total)

    def from_root(self, slot: "Slot", result: "Array") -> "Array":
        """The root's result is the value."""
        return result

    def at_root(self, slot: "Slot", total: "Array", weight: float, optimizer: "Optimizer | None") -> "Array":
        """New weights, or without an optimizer the sum itself."""
        if optimizer is None or slot.value is None:
            return total
        return optimizer.update(slot.id, slot.value, total)

    def export_state(self) -> "dict[str, Array]":
        """Nothing."""
        return {}

    def import_state(self, state: "dict[str, Array]") -> None:
        """Nothing."""
