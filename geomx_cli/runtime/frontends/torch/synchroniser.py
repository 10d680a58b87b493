"""What `wrap` attaches to an optimizer: an algorithm's rounds in a script's own training loop."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.model_state import ModelState

__all__ = ["Synchroniser"]


class Synchroniser(ABC):
    """Base class, one for each wrapped optimizer. For the training thread.

    rounds: begun by this worker. accumulating: within `no_sync`. has_local: the last backward pass was, and steps need
    exchanged gradients. ended: after `finishing`, when the optimizer cannot step any more. replaced: a trained tensor
    that `conclude` has taken from another worker, though this one's should have been the same. in_step: see Compared.
    """

    rounds = 0
    accumulating = False
    has_local = False
    ended = False
    replaced = ""
    in_step = False

    def scale(self) -> float | None:
        """The scale with which the GradScaler of the optimizer has begun, if it is known."""
        return None

    @abstractmethod
    def finishing(self) -> Iterator["Future[None]"]:
        """Contribute what is left, and take part in the other workers' rounds until all are finished.

        Yields what it waits for. Raises the client's error after the job has failed.
        """

    def while_waiting(self, other: "Future[Any]") -> None:
        """Called while the script waits for `other`, a collective operation, until that is done or nothing is left to
        do meanwhile.
        """
        return

    @abstractmethod
    def conclude(self) -> None:
        """After `finishing` of all synchronisers: leave the same tensors in all workers; blocks."""

    def take_newest(self, state: ModelState, *broadcasts: Broadcast, expects_same: bool) -> None:
        """Take all tensors of one worker; blocks. expects_same: this worker's should be equal before, as it has taken
        the last step too.
        """
        changed = state.conclude(*broadcasts, trained=True)
        self.replaced = changed if expects_same else ""

    def check_step(self, state: ModelState, of: str = "worker") -> None:
        """Raise InvalidSettings after the end, if the optimizer is not as it was wrapped, and if it would use gradients
        of this worker, or `of` this party, only.
        """
        state.check_unchanged()
        if self.ended:
            what = "this worker has finished: the other workers no longer train with it"
            raise InvalidSettings(what, "call geomx.finish after the last step")
        if self.has_local:
            what = f"this step would use gradients of this {of} only"
            raise InvalidSettings(what, "leave the last backward pass before a step out of no_sync")
