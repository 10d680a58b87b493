"""DistributedDataParallel where the algorithm exchanges weights: it leaves each worker's gradients as they are."""

import functools
import os
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore

__all__ = ["keep_local", "refuse_synchronised"]


def keep_local(parallel: Any, store: "WrappingStore") -> None:
    """Make every DistributedDataParallel (the class `parallel`) do without exchanges, as within its `no_sync`.

    It copies no tensors either, which `wrap` does. A step of its model by an optimizer that the script has not wrapped
    raises InvalidSettings: each worker would train a model of its own. So do layers that exchange in each pass, where
    workers take different numbers of passes.
    """
    # Not attributes of a model, as `no_sync` has: Lightning sets these with manual optimization.
    parallel.require_backward_grad_sync = parallel.require_forward_param_sync = property(
        lambda _: False, lambda _, value: None
    )
    algorithm = str(store.option("algo"))
    original, process = parallel.__init__, os.getpid()
    models: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(original)
    def initialise(model: Any, module: Any, *args: Any, **options: Any) -> None:
        refuse_synchronised(module, algorithm)
        original(model, module, *args, **{"init_sync": False, **options})
        models.add(model)

    def before_step(optimizer: Any, *_: Any) -> None:
        if os.getpid() != process or store.is_wrapped(optimizer):
            return
        updated = {id(item) for group in optimizer.param_groups for item in group["params"]}
        if any(id(item) in updated for model in models for item in model.parameters()):
            what = f"DistributedDataParallel with --algo {algorithm}, which exchanges weights and not gradients"
            hint = (
                "wrap the optimizer too: optimizer = geomx_cli.torch.wrap(model, optimizer), or the callback of"
                " geomx.hf or geomx.lightning (docs/how-to/frameworks.md); or launch with --algo fsa"
            )
            raise InvalidSettings(what, hint)

    parallel.__init__ = initialise
    register_optimizer_step_pre_hook(before_step)


def refuse_synchronised(module: Any, algorithm: str) -> None:
    """Raise InvalidSettings for layers that exchange in each pass, where workers take different numbers of passes."""
    layers = (name for name, layer in module.named_modules() if isinstance(layer, torch.nn.SyncBatchNorm))
    if plugins.algorithms()[algorithm].own_pace and (name := next(layers, None)) is not None:
        what = f"SyncBatchNorm with --algo {algorithm}: workers take different numbers of steps"
        what += f", and layer {name!r} exchanges in each" if name else ", and it exchanges in each"
        raise InvalidSettings(what, "leave the layers as BatchNorm, or launch with --algo hfa or diloco")
