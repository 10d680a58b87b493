"""Warns of elements that are not finite, which exchanges spread to all workers."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.events import WarningRaised
from geomx_cli.runtime.frontends.torch.tensor_views import local

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["FEW", "GradientCheck", "is_finite", "not_finite", "warn"]

FEW = 65_536
"""Elements of a tensor that is looked at in each step."""


def is_finite(tensor: Any) -> bool:
    """Whether all elements of a detached tensor are finite."""
    # A sum takes one pass and no memory, but may overflow where all elements are finite.
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def not_finite(where: str, what: str) -> str:
    """The warning that elements `where` spoil `what` all workers train with."""
    return f"{where}, so {what} have them from now on; is the learning rate too high, or a sample damaged?"


def warn(client: "Client", message: str) -> None:
    """Warn the user of what affects the result."""
    print(f"warning: {message}", file=sys.stderr, flush=True)
    client.events.write(WarningRaised(message=message, affects_result=True))


class GradientCheck:
    """Warns, once, in the worker whose gradients bring nan or infinity to the weights of all, as a batch does, or the
    worker's own weights. For the training thread.

    Looks at the first small tensor: a backward pass takes what is not finite from where it begins to the input. Where
    GradScaler skips the step the weights stay finite, and nothing is said. trained: if there is none yet, it looks at
    gradients of no parameter (None), as in DistributedDataParallel's buckets. where: whose the gradients are.
    """

    def __init__(self, warn: Callable[[str], None], trained: Mapping[str, Any], where: str = "here") -> None:
        self._warn = warn
        self._where = where
        self._trained = trained
        self._name = next((name for name, tensor in trained.items() if local(tensor).numel() <= FEW), "")
        self._parameter = trained.get(self._name)
        self._suspected = 0  # the round of gradients that are not finite here, while the weights were
        self._received_sound = True  # the last means: what is not finite here later began here
        self._looks = True

    def contributes(self, parameter: Any, gradient: Any, round_: int) -> None:
        """The elements of a parameter's gradient, detached, before it becomes the mean."""
        if parameter is not self._parameter or not self._looks or is_finite(gradient):
            return
        if not (spoiled := self._spoiled()):
            if self._received_sound:  # else these gradients may be those of an earlier pass, to which this one adds
                self._suspected = round_
        elif self._received_sound:
            self._say(f"parameter {spoiled} has elements that are not finite {self._where} in step {round_}")

    def received(self, parameter: Any, mean: Any) -> None:
        """The elements of a parameter's mean gradient, detached."""
        if parameter is self._parameter and self._looks:
            self._received_sound = is_finite(mean)

    def stepped(self) -> None:
        """The optimizer has taken the step with the means, or another skipped it."""
        suspected, self._suspected = self._suspected, 0
        if not suspected and self._received_sound:
            return
        if not self._spoiled():
            self._received_sound = True
        elif suspected:
            which = f"the gradient of {self._name}" if self._name else "a gradient"
            where = f"{which} has elements that are not finite {self._where}"
            self._say(f"{where} in step {suspected}")

    def begin_pass(self) -> None:
        """Another backward pass begins, before a step or after it: until that, its gradients add to the means."""
        if (self._suspected or not self._received_sound) and (self._spoiled() or not self._accumulates()):
            self.stepped()

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _accumulates(self) -> bool:
        """Whether means that are not finite wait for a step."""
        gradients = (tensor.grad for tensor in self._trained.values() if tensor.grad is not None)
        return not all(is_finite(local(gradient)) for gradient in gradients)

    def _say(self, where: str) -> None:
        self._looks = False
        self._warn(not_finite(where, "all workers' weights"))

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _spoiled(self) -> str:
        """The first tensor whose weights are not finite; "" for none."""
        return next((name for name, tensor in self._trained.items() if not is_finite(local(tensor))), "")
