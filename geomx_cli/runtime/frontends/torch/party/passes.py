"""Backward passes of a party's workers, which add their gradients."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.runtime.frontends.torch.backward_pass import check_no_pass
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.buffer_broadcast import BUFFERS
from geomx_cli.runtime.frontends.torch.model_state import EXCHANGED, ModelState
from geomx_cli.runtime.frontends.torch.party.buckets import Bucket, Buckets, Slot
from geomx_cli.runtime.frontends.torch.script_model import last_gradients
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.party.operations import Operations

__all__ = ["PartySynchroniser"]


class PartySynchroniser(Synchroniser):
    """Base class of what `wrap` attaches to an optimizer in such a party; see Member.

    A backward pass, except within `no_sync`, adds the gradients of the party's workers. One that has finished
    contributes zeros to the others' passes. check: gets a gradient of this worker's in each pass.
    """

    def __init__(
        self, operations: "Operations", state: ModelState, optimizer: Any, statistics: Sequence[Any],
        on_begun: Callable[[Bucket], None] | None, check: BatchCheck,
    ) -> None:  # fmt: skip
        self.operations = operations
        self.group = operations.group
        self.state = state
        self.slots = _slots(state, statistics)
        self._statistics = self.slots[0] if statistics else None
        self.sums = Buckets(self.group, self.slots, operations.device, on_begun)
        self._check = check
        self.has_newest = True  # of all workers' models, as this one contributed to the last round
        self.has_failed = False
        for slot in self.slots:
            if slot.parameter is not None:
                slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot))
        optimizer.register_step_pre_hook(self._before_step)
        operations.add(self)

    def announce(self, active: Sequence[int]) -> None:
        """See Member."""

    @abstractmethod
    def receive(self, active: Sequence[int]) -> None:
        """See Member: leave the means in the gradients."""

    def fail(self) -> None:
        """See Member."""
        self.has_failed = True
        self.sums.checks = False  # the script may have cleared its gradients

    def after_step(self, active: Sequence[int]) -> None:
        """See Member."""

    def _on_gradient(self, slot: Slot, parameter: Any) -> None:
        """Autograd hook, for the parameter whose gradient is complete."""
        if self.ended:
            return
        if self.accumulating:
            self.has_local = True
            return
        self.operations.reach(self)
        if self.operations.overlaps:
            self.load(slot)

    def load(self, slot: Slot) -> None:
        """Contribute this worker's gradient to the pass."""
        self.sums.load(slot)

    def begin(self) -> None:
        """See Member."""
        self.sums.begin()

    def contribute(self) -> None:
        """See Member."""
        for slot in self.slots:
            if not slot.loaded and slot.parameter is not None and slot.parameter.grad is not None:
                self.load(slot)
        if self._statistics is not None:
            self.sums.load(self._statistics)
        self.sums.flush()
        self.has_local = False
        if self._check.compares:
            self._check.observe(*last_gradients(self.state))

    def contribute_nothing(self) -> None:
        """See Member."""
        self.has_newest = False
        self.sums.begin()
        self.sums.flush()
        self._check.observe()  # what it gathers, all of the party's workers gather in the same pass

    def leave(self) -> None:
        """See Member."""
        self._check.finish()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        check_no_pass()
        self.check_step(self.state)


def _slots(state: ModelState, statistics: Sequence[Any]) -> list[Slot]:
    """In the model's order, with the higher priorities first; the statistics are sent last, so they come first."""
    slots = [
        Slot(f"{state.prefix}{name}", parameter.numel(), EXCHANGED[parameter.dtype], -index, parameter)
        for index, (name, parameter) in enumerate(state.trained.items())
    ]
    if statistics:
        size = sum(tensor.numel() for tensor in statistics)
        slots.insert(
            0, Slot(f"{state.prefix}{BUFFERS}", size, torch.float32, -len(slots), buffers=list(statistics))
        )
    return slots
