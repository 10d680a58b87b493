"""Warns if a script trains without exchanging anything: each worker would train a model of its own."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore

__all__ = ["watch"]

_STEPS = 50
_LARGE = 1024
"""Elements that are no single figures, however large the model is."""


def watch(optimizer_module: Any, session: "ScriptSession") -> None:
    """Watch all optimizers of torch.optim in the worker's own process."""
    if os.environ.get("GEOMX_SCRIPT_PROCESS", str(os.getpid())) == str(os.getpid()):
        watcher = _StepWatch(session, os.getpid())
        optimizer_module.register_optimizer_step_post_hook(watcher.after_step)


_TOGETHER = "use torch.distributed.init_process_group and DistributedDataParallel, or geomx_cli.torch.wrap"
_BY_BACKWARD = "gradients are exchanged by loss.backward(), and not by torch.autograd.grad"
_ALONE = f"{_STEPS} optimizer steps, and nothing was exchanged: each worker trains a model of its own;"


class _StepWatch:
    """Warns once, after so many optimizer steps in a row during which nothing was exchanged, unless these are local
    steps on purpose; and of a step by which an optimizer that is not wrapped changes a wrapped model. In collective
    operations a model, or its gradients, has at least as many elements as are trained, or as were before a layer was
    unfrozen; losses and counts have fewer.
    """

    def __init__(self, session: "ScriptSession", process: int) -> None:
        self._session = session
        self._process = process
        self._calls = 0
        self._enough = _LARGE
        self._steps = 0
        self._ended = False

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Hook of all optimizers."""
        if self._ended:
            return
        store = self._session.store
        calls = 0 if store is None else store.calls
        begun, self._calls = calls - self._calls, calls
        wrapping = _wrapping(store)
        if wrapping is not None and wrapping.finished:
            return
        is_exchanged = wrapping is not None and wrapping.exchanges_gradients and begun > 0
        if wrapping is not None and wrapping.is_foreign(optimizer) and not is_exchanged:
            self._warn(
                "an optimizer that is not wrapped takes steps of a wrapped model: none of them is exchanged; keep the"
                " one that geomx_cli.torch.wrap got, and change the rate in its param_groups or by a schedule"
            )
        is_wrapped = wrapping is not None and wrapping.is_wrapped(optimizer)
        is_local = is_wrapped and wrapping is not None and not wrapping.exchanges_gradients
        counts_rounds = wrapping is not None and wrapping.wraps
        is_together = begun > 0 and (counts_rounds or begun >= min(self._enough, _trained(optimizer)))
        if is_together and not counts_rounds:
            self._enough = min(self._enough, begun)
        self._steps = 0 if is_local or is_together else self._steps + 1
        if self._steps >= _STEPS:
            self._warn(f"{_ALONE} {_BY_BACKWARD if is_wrapped else _TOGETHER}")

    def _warn(self, message: str) -> None:
        self._ended = True
        if os.getpid() == self._process and self._session.num_all_workers != 1:
            self._session.warn(message, affects_result=True)


def _trained(optimizer: Any) -> int:
    """The elements that it trains."""
    return sum(each.numel() for group in optimizer.param_groups for each in group["params"] if each.requires_grad)


def _wrapping(store: Any) -> "WrappingStore | None":
    # Not before a step: it imports torch, which this module is loaded in the middle of.
    from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore

    return store if isinstance(store, WrappingStore) else None
