"""The changes to DistributedDataParallel: buffers, hooks, Join, and gradients that the algorithm does not exchange."""

import functools
import os
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.ddp.process_group import GeomxProcessGroup
from geomx_cli.runtime.frontends.torch.tensors import write_bytes

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.store import Store

__all__ = [
    "keep_local", "refuse_join", "refuse_synchronised", "replace_buffer_broadcast", "replace_built_in_hooks",
]  # fmt: skip

_ENOUGH = 10
"""Number of forward passes with a broadcast after which there is a warning."""


def replace_buffer_broadcast(parallel: Any, session: "ScriptSession") -> None:
    """Change how DistributedDataParallel (the class `parallel`) broadcasts buffers in geomx's process groups.

    Statistics of batch normalization change in forward passes, and nothing reads them in training. So rank 0's buffers
    are sent with the gradients of the backward pass. The other workers write them when the next forward pass would
    broadcast them. This gives the same values without a round trip. PyTorch broadcasts other buffers, and the buffers
    of a forward pass that reads its statistics. One warning reports this.
    """
    original = parallel._sync_buffers
    models: weakref.WeakKeyDictionary[Any, _Statistics] = weakref.WeakKeyDictionary()
    warning = _Warning(session)

    @functools.wraps(original)
    def sync_buffers(model: Any) -> None:
        if not isinstance(model.process_group, GeomxProcessGroup):
            original(model)
            return
        own = models.setdefault(model, _Statistics(model.process_group))
        read = _read_in_forward(model)
        if read or hasattr(model, "buffer_hook"):
            own.discard()
            original(model)
            warning.count(model, read)
            return
        model._assign_modules_buffers()
        if not own.write(model.modules_buffers):
            original(model)
        own.send_in_next_pass(model.modules_buffers)

    parallel._sync_buffers = torch.compiler.disable(sync_buffers)  # called in forward passes, which may be compiled


def refuse_join(parallel: Any) -> None:
    """Make torch.distributed.algorithms.Join raise InvalidSettings for a model in geomx's process groups. For workers
    without batches, Join reduces outside of any backward pass, and this would not match the other workers' gradients.
    """
    original = parallel.join_hook

    @functools.wraps(original)
    def join_hook(model: Any, **options: Any) -> Any:
        if isinstance(model.process_group, GeomxProcessGroup):
            hint = "give all workers equally many batches (DistributedSampler), or use geomx_cli.torch.wrap, with which"
            raise InvalidSettings("Join with DistributedDataParallel", f"{hint} they need not have")
        return original(model, **options)

    parallel.join_hook = join_hook


def _read_in_forward(model: Any) -> list[str]:
    """The names of the buffers that the forward pass may read."""
    written = {
        id(buffer)
        for module in model.modules()
        if isinstance(module, torch.nn.modules.batchnorm._NormBase) and module.training
        for buffer in module.buffers(recurse=False)
    }
    return [name for name, buffer in model.module.named_buffers() if id(buffer) not in written]


class _Statistics:
    """The buffers of one model on their way from rank 0."""

    def __init__(self, group: GeomxProcessGroup) -> None:
        self._group = group
        self._waits = False  # whether they wait for a backward pass
        self._received: Future[Array] | None = None

    def send_in_next_pass(self, buffers: list[Any]) -> None:
        """Make the next backward pass bring rank 0's buffers to all workers, as they are when its first gradients are
        sent.
        """
        if not self._waits:
            self._waits = True
            self._group.in_next_pass(lambda: self._send(buffers))

    def _send(self, buffers: list[Any]) -> None:
        self._waits = False
        parts = [buffer.detach().reshape(-1).view(torch.uint8) for buffer in buffers]
        own = torch.cat(parts).cpu().numpy() if self._group.rank() == 0 else None
        self._received = self._group.rounds.broadcast(0, own, sum(part.numel() for part in parts))

    def write(self, buffers: list[Any]) -> bool:
        """Wait for the buffers that came with a backward pass, and write them. Return False if there are no unwritten
        buffers.
        """
        if self._received is None:
            return False
        received, self._received, start = self._received.result(), None, 0
        for buffer in buffers if self._group.rank() else ():
            end = start + buffer.numel() * buffer.element_size()
            write_bytes(buffer.data, np.array(received[start:end]))  # autograd may have saved the buffer itself
            start = end
        return True

    def discard(self) -> None:
        """A broadcast has brought newer buffers."""
        self._received = None


class _Warning:
    """Warns once, in one worker, that forward passes of training wait for a broadcast."""

    def __init__(self, session: "ScriptSession") -> None:
        self._session = session
        self._left = _ENOUGH

    def count(self, model: Any, read: list[str]) -> None:
        """Note a broadcast before a forward pass that may read these buffers."""
        group = model.process_group
        if not model.training or not read or group.rank() or group.size() == 1 or not self._left:
            return
        self._left -= 1
        if not self._left:
            names = ", ".join(read[:3]) + (", ..." if len(read) > 3 else "")
            self._session.warn(
                f"DistributedDataParallel broadcasts buffers ({names}) before every forward pass, a round trip between"
                " the sites each; if all workers compute the same values, spare it with broadcast_buffers=False"
            )


def replace_built_in_hooks(parallel: Any) -> None:
    """Make DistributedDataParallel (the class `parallel`) use PyTorch's own hooks in Python instead of the hooks in
    C++, which need futures that only C++ can make.
    """
    original = parallel._register_builtin_comm_hook

    @functools.wraps(original)
    def register_hook(model: Any, kind: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        name = str(kind).rpartition(".")[2]
        hooks = {"ALLREDUCE": default_hooks.allreduce_hook, "FP16_COMPRESS": default_hooks.fp16_compress_hook}
        if isinstance(model.process_group, GeomxProcessGroup) and name in hooks:
            model.register_comm_hook(model.process_group, hooks[name])
        else:
            original(model, kind)

    parallel._register_builtin_comm_hook = register_hook


def keep_local(parallel: Any, store: "Store") -> None:
    """Make every DistributedDataParallel (the class `parallel`) exchange nothing, as within its `no_sync`.

    It copies no tensors either, because `wrap` copies them. If an optimizer that the script has not wrapped takes a
    step for its model, InvalidSettings is raised, because each worker would train a model of its own. It is also raised
    for layers that exchange in each pass, if workers take different numbers of passes.
    """
    # Properties of the class, not attributes of a model as in `no_sync`: with manual optimization Lightning sets the
    # attributes.
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
    """Raise InvalidSettings for layers that exchange in each pass, if workers take different numbers of passes."""
    layers = (name for name, layer in module.named_modules() if isinstance(layer, torch.nn.SyncBatchNorm))
    if plugins.algorithms()[algorithm].own_pace and (name := next(layers, None)) is not None:
        what = f"SyncBatchNorm with --algo {algorithm}: workers take different numbers of steps"
        what += f", and layer {name!r} exchanges in each" if name else ", and it exchanges in each"
        raise InvalidSettings(what, "leave the layers as BatchNorm, or launch with --algo hfa or diloco")
