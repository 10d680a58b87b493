"""Warns of elements that are not finite, which exchanges spread to all workers."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.events import WarningRaised
from geomx_cli.runtime.frontends.torch.tensor_parts import local

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client

__all__ = ["GradientCheck", "is_finite", "warn_not_finite"]

_FEW = 65_536
"""Elements of a tensor that is looked at in each step."""


def is_finite(tensor: Any) -> bool:
    """Whether all elements of a detached tensor are finite."""
    # A sum takes one pass and no memory, but may overflow where all elements are finite.
    return bool(tensor.sum().isfinite() or tensor.isfinite().all())


def warn_not_finite(client: "Client", where: str, what: str) -> None:
    """Warn the user that elements `where` spoil `what` all workers train with."""
    message = f"{where}, so {what} have them from now on; is the learning rate too high, or a sample damaged?"
    print(f"warning: {message}", file=sys.stderr, flush=True)
    client.events.write(WarningRaised(message=message, affects_result=True))


class GradientCheck:
    """Warns, once, in the worker whose gradients bring nan or infinity to the weights of all. For the training thread.

    Looks at the first small tensor: a backward pass takes what is not finite from where it begins to the input. Where
    GradScaler skips the step the weights stay finite, and nothing is said.
    """

    def __init__(self, client: "Client", trained: Mapping[str, Any]) -> None:
        self._client = client
        self.name = next((name for name, tensor in trained.items() if local(tensor).numel() <= _FEW), "")
        self._parameter = trained.get(self.name)
        self._suspected = 0  # the round of gradients that are not finite here, while the weights were
        self._looks = True

    def contributes(self, elements: "Array", round_: int) -> None:
        """This worker's gradient of the tensor `name`, before it becomes the mean."""
        if self._looks and not is_finite(torch.from_numpy(elements)) and self._is_sound():
            self._suspected = round_

    def stepped(self) -> None:
        """The optimizer has taken the step with the means, or another skipped it."""
        suspected, self._suspected = self._suspected, 0
        if suspected and not self._is_sound():
            self._looks = False
            where = f"the gradient of {self.name} has elements that are not finite here in step {suspected}"
            warn_not_finite(self._client, where, "all workers' weights")

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _is_sound(self) -> bool:
        return is_finite(local(self._parameter))
