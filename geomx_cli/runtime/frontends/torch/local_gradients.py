"""DistributedDataParallel where the algorithm exchanges weights: it leaves each worker's gradients as they are."""

import functools
import os
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from geomx_cli.core.errors import InvalidSettings

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.group_store import GroupStore

__all__ = ["keep_local"]


def keep_local(parallel: Any, store: "GroupStore") -> None:
    """Make every DistributedDataParallel (the class `parallel`) do without exchanges, as within its `no_sync`.

    It copies no tensors either, which `wrap` does. A step of its model raises InvalidSettings if the script has
    wrapped no optimizer: each worker would train a model of its own.
    """
    original = parallel.__init__

    @functools.wraps(original)
    def initialise(model: Any, *args: Any, **options: Any) -> None:
        original(model, *args, **{"init_sync": False, **options})
        model.require_backward_grad_sync = model.require_forward_param_sync = False

    parallel.__init__ = initialise
    process = os.getpid()

    def before_step(optimizer: Any, *_: Any) -> None:
        if os.getpid() == process and not store.wraps:
            algorithm = store.option("algo")
            what = f"DistributedDataParallel with --algo {algorithm}, which exchanges weights and not gradients"
            hint = (
                "wrap the optimizer too: optimizer = geomx_cli.torch.wrap(model, optimizer), or the callback of"
                " geomx.hf or geomx.lightning (docs/frameworks.md); or launch with --algo fsa"
            )
            raise InvalidSettings(what, hint)

    register_optimizer_step_pre_hook(before_step)
