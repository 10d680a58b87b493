"""Warns of scripts that train without exchanging, or exchange without need. Lets the workers' models be compared."""

import os
import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.store import Store

__all__ = ["RoundTrips", "watch"]

_STEPS = 50
_LARGE = 1024
"""A tensor with so many elements is no single figure, however large the model is."""


def watch(optimizer_module: Any, session: "ScriptSession") -> None:
    """Watch all optimizers of torch.optim in the worker's own process. PyTorch is imported at this time."""
    optimizer_module.register_optimizer_step_pre_hook(_Comparison(session).before_step)
    if os.environ.get("GEOMX_SCRIPT_PROCESS", str(os.getpid())) == str(os.getpid()):
        optimizer_module.register_optimizer_step_post_hook(_StepWatch(session, os.getpid()).after_step)


class _Comparison:
    """Lets the workers' models be compared in steps of any optimizer; see ModelWatch, which needs PyTorch."""

    def __init__(self, session: "ScriptSession") -> None:
        self._session = session
        self._process = os.getpid()

    def before_step(self, optimizer: Any, *_: Any) -> None:
        """Hook of all optimizers."""
        store = self._session.store
        if store is None or self._session.num_all_workers == 1 or os.getpid() != self._process:
            return
        from geomx_cli.runtime.frontends.torch.model_watch import Watchable

        if isinstance(store, Watchable):
            store.watch.before_step(store, optimizer)


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

    One worker may train a probe or a teacher alone. For an optimizer that is not wrapped, it reports this to the
    servers. They warn once all workers have taken so many steps between the same exchanges. After the first exchange,
    only two kinds
    of optimizers count: those that have taken part in an exchange, and those that update parameters which the workers
        train together. Until it has joined the job, a worker does not know of others. The first worker may be alone, so
        the others warn.

    It also warns of a step by which an optimizer that is not wrapped changes a wrapped model. In collective operations,
    a model or its gradients have at least as many elements as are trained, or as were trained before a layer was
    unfrozen. Losses and counts have fewer.
    """

    def __init__(self, session: "ScriptSession", process: int) -> None:
        self._session = session
        self._process = process
        self._calls = 0
        self._enough = _LARGE
        self._early = 0  # steps before this worker joined
        self._steps = 0
        self._exchanges = 0  # number of steps that followed an exchange
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
            self._warn(_NOT_JOINED, affects_result=False)  # if no exchange follows, there is no result

    def _count(self, wrapping: "Store", optimizer: Any, begun: int) -> None:
        """begun: the exchanges since the step before, as the store's `calls` counts them."""
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
    """The number of elements that it trains."""
    return sum(each.numel() for group in optimizer.param_groups for each in group["params"] if each.requires_grad)


def _wrapping(store: Any) -> "Store | None":
    # Not before a step: it imports torch, and this module is loaded while torch is being imported.
    from geomx_cli.runtime.frontends.torch.store import Store

    return store if isinstance(store, Store) else None


# Warns of collectives that frameworks make by default and that are not needed: between sites each costs a round trip.

_ENOUGH = 10
"""Number of calls from one place after which there is a warning."""
_LOOKED_AT = 2000
"""Number of a script's calls whose places are looked for: frequent calls occur often among them."""


@dataclass(frozen=True)
class _Place:
    """A framework's function whose calls of collectives are avoidable, and the warning."""

    module: str
    function: str
    warning: str


_PLACES = (
    _Place(
        "transformers.trainer", "_get_num_items_in_batch",
        "HF's Trainer counts the tokens of all workers before every step, a round trip between the sites each; if"
        " their batches have about as many, spare it with TrainingArguments(average_tokens_across_devices=False)",
    ),
    _Place(
        "transformers.trainer", "_track_num_input_tokens",
        "HF's Trainer counts the input tokens of all workers in every step, a round trip between the sites each; spare"
        ' it with TrainingArguments(include_num_input_tokens_seen="no")',
    ),
    _Place(
        "transformers.trainer", "evaluation_loop",
        "HF's Trainer gathers the predictions of all workers after each batch of an evaluation, 5 round trips or more"
        " between the sites; take a larger per_device_eval_batch_size, or without compute_metrics"
        " prediction_loss_only=True, which leaves one",
    ),
    _Place(
        "accelerate.data_loader", "_fetch_batches",
        "Accelerate reads an iterable data set in the first worker and sends its batches to the others, over the WAN;"
        " let each worker read its part, with dispatch_batches=False (of Accelerator's DataLoaderConfiguration, or of"
        " TrainingArguments' accelerator_config)",
    ),
    _Place(
        "lightning.pytorch.loops.training_epoch_loop", "_broadcast_sigterm_tensor",
        "Lightning asks the first worker before every batch whether it was told to end, a round trip between the sites"
        " each; spare it with Trainer(strategy=geomx.lightning.Strategy()), or geomx.lightning.Callback()",
    ),
    _Place(
        "lightning.pytorch.callbacks.timer", "_check_time_remaining",
        "Lightning asks the first worker after every batch whether max_time is over, a round trip between the sites"
        ' each; ask once in an epoch, with the callback Timer(duration, interval="epoch"), or give max_steps',
    ),
    _Place(
        "lightning.pytorch.trainer.connectors.logger_connector.result", "update",
        "Lightning reduces a value that is logged in every step, a round trip between the sites each; log it with"
        " sync_dist=False, or on_step=False, which reduces it once in an epoch",
    ),
)  # fmt: skip


class RoundTrips:
    """Counts a script's collectives by the framework's function that makes them, and warns once for each function."""

    def __init__(self, session: "ScriptSession", *, warns: bool) -> None:
        self._session = session
        self._left = _LOOKED_AT if warns else 0
        self._counts: Counter[_Place] = Counter()

    def count(self) -> None:
        """Note a collective that the caller's caller begins outside of a backward pass."""
        if not self._left:
            return
        self._left -= 1
        if (place := _place(sys._getframe(1))) is not None:
            self._counts[place] += 1
            if self._counts[place] == _ENOUGH:
                self._session.warn(place.warning)


def _place(frame: FrameType | None) -> _Place | None:
    """The innermost known function on the stack."""
    while frame is not None:
        for place in _PLACES:
            if frame.f_code.co_name == place.function and frame.f_globals.get("__name__") == place.module:
                return place
        frame = frame.f_back
    return None
