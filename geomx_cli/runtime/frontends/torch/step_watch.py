"""Warns if a script trains without exchanging anything: each worker would train a model of its own."""

import os
import weakref
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


_NOT_JOINED = (
    f"{_STEPS} optimizer steps before this worker has joined the job: each worker trains a model of its own; use"
    " torch.distributed.init_process_group and DistributedDataParallel, or geomx_cli.torch.wrap"
)
_NOT_EXCHANGED = (
    f"{_STEPS} optimizer steps, and nothing was exchanged: each worker trains a model of its own; gradients are"
    " exchanged by loss.backward(), and not by torch.autograd.grad"
)
_FOREIGN = (
    "an optimizer that is not wrapped takes steps of a wrapped model: none of them is exchanged; keep the one that"
    " geomx_cli.torch.wrap got, and change the rate in its param_groups or by a schedule"
)


class _StepWatch:
    """Counts optimizer steps in a row during which nothing was exchanged, unless these are local steps on purpose.

    One worker may train a probe or a teacher alone: of an optimizer that is not wrapped it tells the servers, which
    warn once all workers have taken so many steps between the same exchanges. After the first exchange only optimizers
    count that have taken part in one, or that update parameters which the workers train together. Until it has joined
    the job no worker knows of others, and the first one may be alone: the others warn.

    It also warns of a step by which an optimizer that is not wrapped changes a wrapped model. In collective operations
    a model, or its gradients, has at least as many elements as are trained, or as were before a layer was unfrozen;
    losses and counts have fewer.
    """

    def __init__(self, session: "ScriptSession", process: int) -> None:
        self._session = session
        self._process = process
        self._calls = 0
        self._enough = _LARGE
        self._early = 0  # steps before this worker has joined
        self._steps = 0
        self._exchanges = 0  # steps that followed one
        self._exchanged: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that have taken such a step
        self._ended = False

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Hook of all optimizers."""
        if self._ended:
            return
        if (store := self._session.store) is None:
            self._count_before_joining()
        elif (wrapping := _wrapping(store)) is not None:
            begun, self._calls = store.calls - self._calls, store.calls
            if not wrapping.finished:
                self._count(wrapping, optimizer, begun)

    def _count_before_joining(self) -> None:
        self._early += 1
        if self._early == _STEPS and os.environ.get("RANK") != "0":
            self._warn(_NOT_JOINED, affects_result=False)  # without an exchange later there is no result

    def _count(self, wrapping: "WrappingStore", optimizer: Any, begun: int) -> None:
        """begun: what was exchanged since the step before, as `calls` of the store counts it."""
        is_wrapped, trains_weights = wrapping.is_wrapped(optimizer), not wrapping.exchanges_gradients
        if wrapping.is_foreign(optimizer) and (trains_weights or not begun):
            self._warn(_FOREIGN)
        if begun > 0 and (wrapping.wraps or begun >= min(self._enough, _trained(optimizer))):
            if not wrapping.wraps:
                self._enough = min(self._enough, begun)
                self._exchanged.add(optimizer)
            self._steps = 0
            self._exchanges += 1
        elif is_wrapped and trains_weights:
            self._steps = 0
        elif not self._exchanges or optimizer in self._exchanged or wrapping.updates_common(optimizer):
            self._steps += 1
            if self._steps == _STEPS and is_wrapped:
                self._warn(_NOT_EXCHANGED)
            elif self._steps == _STEPS and self._is_member:
                wrapping.tell_alone(self._exchanges)

    @property
    def _is_member(self) -> bool:
        """Whether this is the worker itself, and not a process that it has forked, in a job of several."""
        return os.getpid() == self._process and self._session.num_all_workers != 1

    def _warn(self, message: str, *, affects_result: bool = True) -> None:
        self._ended = affects_result
        if self._is_member:
            self._session.warn(message, affects_result=affects_result)


def _trained(optimizer: Any) -> int:
    """The elements that it trains."""
    return sum(each.numel() for group in optimizer.param_groups for each in group["params"] if each.requires_grad)


def _wrapping(store: Any) -> "WrappingStore | None":
    # Not before a step: it imports torch, which this module is loaded in the middle of.
    from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore

    return store if isinstance(store, WrappingStore) else None
