"""The loops of a Lightning Trainer between two batches: the saved state, and how another process returns to it."""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from lightning.pytorch.loops.loop import _Loop
from torchmetrics import Metric

from geomx_cli.runtime.frontends.torch.loader_place import has_indices
from geomx_cli.runtime.frontends.torch.trainers import TrainingRun
from geomx_cli.runtime.frontends.torch.trainers.batch_order import BatchOrder
from geomx_cli.runtime.frontends.torch.trainers.loop_state import LOOP
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["LightningLoop"]

_METRICS = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics")
_WITHIN = ("_first_loop_iter", "_current_fx")
"""Attributes of the connector of loggers: the newest values, and its state in the epoch."""
_SUMS = ("value", "cumulated_batch_size")
"""Attributes of a value that is reduced over an epoch."""


class LightningLoop:
    """A Trainer's loops, as an object that a state saves.

    Lightning's own loops return to the epoch and the batch, by their `load_state_dict`. Lightning has no hook between
    two batches, because validation follows the last hook of a batch. So this class replaces the loops' `advance` in
    this Trainer.
    """

    def __init__(self, trainer: Any, run: TrainingRun) -> None:
        self.samples = 0  # of this worker since the last report
        self._trainer = trainer
        self._run = run
        self._order: BatchOrder | None = None
        self._has_begun = False  # a batch
        self._returns_to = State()
        if run.saves:
            self._follow_loader()

    def _follow_loader(self) -> None:
        strategy = self._trainer.strategy
        original = strategy.process_dataloader

        @functools.wraps(original)
        def process(loader: Any) -> Any:
            found = original(loader)
            if self._trainer.training and self._order is None and has_indices(found):
                found, self._order = BatchOrder.in_copy(found)
            return found

        strategy.process_dataloader = process

    def begin(self, module: Any) -> None:
        """Training begins. Save from now on, or continue from the state that an earlier life has saved."""
        trainer, run = self._trainer, self._run
        if not run.saves:
            return
        if trainer.reload_dataloaders_every_n_epochs:
            run.give_up("reload_dataloaders_every_n_epochs makes loaders to which no other process can return")
            return
        objects = {f"optimizer {at}": each for at, each in enumerate(trainer.optimizers)}
        objects |= {f"scheduler {at}": each.scheduler for at, each in enumerate(trainer.lr_scheduler_configs)}
        self._returns_to = run.keep(module, {**objects, "precision": trainer.precision_plugin, LOOP: self})
        loop = trainer.fit_loop.epoch_loop
        loop.advance = functools.partial(self._advance, loop.advance)
        if self._returns_to.values:
            # Lightning's warning is true of Lightning alone: here the loader returns to its place.
            warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
        run.begin_repeatable()

    def begin_epoch(self) -> None:
        """An epoch begins. No later life of this worker repeats the steps before it."""
        self._run.end_repeatable()
        if self._order is not None and self._trainer.current_epoch:  # the first epoch's pass began before
            self._order.begin_pass()

    def _advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        """Replaces the loop's `advance`, which takes a batch and trains on it."""
        loop = self._trainer.fit_loop.epoch_loop
        self._run.end_repeatable()
        returns = bool(self._returns_to.values)
        if returns:
            self._return(fetcher)
            self._run.go_on()
        self._has_begun = True
        self._run.reach(self._trainer.current_epoch, loop.batch_progress.current.ready, self._place)
        advance(fetcher)
        if returns and self._order is not None:
            self._order.end_return()

    def _place(self) -> State:
        batch = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        state = State({"batch": batch, "has_order": self._order is not None})
        if self._order is not None:
            state.add("order", self._order.place(batch))
        return state

    def _return(self, fetcher: Any) -> None:
        """The loops are within the epoch. Return to the place in the data."""
        place, self._returns_to = self._returns_to, State()
        for loop in _loops(self._trainer.fit_loop):
            # From here on the loops need not make up for anything, as they would after a checkpoint.
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            loop.reset_restart_stage()
        batch = place.values["batch"]
        combined = self._trainer.fit_loop._combined_loader
        is_one = len(combined.flattened) == 1
        if is_one and self._order is not None and place.values["has_order"]:
            self._order.return_to(place.part("order"), skips=True)
            iter(fetcher)
            fetcher.fetched = batch
            return
        iter(fetcher)
        if not all(hasattr(each, "load_state_dict") for each in combined.flattened):
            for _ in range(batch):
                next(fetcher)

    # The saved state.

    def state_dict(self) -> dict[str, Any]:
        """The state that the loops, the callbacks and the logged values keep between two batches."""
        trainer, connector = self._trainer, self._trainer._logger_connector
        logged = trainer.fit_loop.epoch_loop._results.items()
        return {
            "begun": self._has_begun, "loops": trainer.fit_loop.state_dict(), "should_stop": trainer.should_stop,
            "callbacks": {each.state_key: own for each in trainer.callbacks if (own := each.state_dict())},
            "newest": {name: dict(getattr(connector, name)) for name in _METRICS},
            "within": {name: getattr(connector, name) for name in _WITHIN},
            "logged": {key: _sums(each) for key, each in logged if each.is_tensor and not each.has_reset},
            "metrics": {name: _metric(each) for name, each in self._module_metrics()},
            "reported": self._run.step, "samples": self.samples,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, in loops that have begun. Do nothing if the saved life had reached no batch."""
        if not state["begun"]:
            return
        trainer, connector, loop = self._trainer, self._trainer._logger_connector, self._trainer.fit_loop
        self._run.step, self.samples = state["reported"], state["samples"]
        loop.load_state_dict(state["loops"])
        loop._load_combined_loader_states()
        loop.reset()  # once more: it finds out where to continue
        trainer.should_stop = state["should_stop"]
        for each in trainer.callbacks:
            if each.state_key in state["callbacks"]:
                each.load_state_dict(state["callbacks"][each.state_key])
        for name, values in (*state["newest"].items(), *state["within"].items()):
            setattr(connector, name, values)
        for name, metric in self._module_metrics():
            for key, value in state["metrics"].get(name, {}).items():
                setattr(metric, key, _on(metric.device, value))
        self._add_sums(state["logged"])

    def _module_metrics(self) -> list[tuple[str, Any]]:
        modules = self._trainer.lightning_module.named_modules()
        return [(name, each) for name, each in modules if isinstance(each, Metric)]

    def _add_sums(self, saved: Mapping[str, Any]) -> None:
        """Values that are reduced over the epoch: the loop makes them when they are logged next."""
        results = self._trainer.fit_loop.epoch_loop._results
        original, left = results.log, dict(saved)

        @functools.wraps(original)
        def log(*args: Any, **options: Any) -> None:
            original(*args, **options)
            for key in [key for key in left if key in results]:
                _add(results[key], left.pop(key))
            if not left:
                del results.log

        if left:
            results.log = log


def _loops(loop: Any) -> Iterator[Any]:
    """A loop and the loops within it."""
    yield loop
    for each in vars(loop).values():
        if isinstance(each, _Loop):
            yield from _loops(each)


def _sums(result: Any) -> dict[str, Any]:
    return {name: getattr(result, name) for name in _SUMS if hasattr(result, name)}


def _add(result: Any, saved: Mapping[str, Any]) -> None:
    """Add to a value that was logged for the first time in this process."""
    if not result.meta.on_epoch:
        return
    for name, earlier in saved.items():
        own = getattr(result, name)
        before = earlier.to(own.device)
        is_sum = name != "value" or result.meta.is_mean_reduction or result.meta.is_sum_reduction
        setattr(result, name, before + own if is_sum else result.meta.reduce_fx(before, own))
    result._computed = None


def _metric(metric: Any) -> dict[str, Any]:
    return {name: getattr(metric, name) for name in (*metric._defaults, "_update_count")}


def _on(device: Any, value: Any) -> Any:
    if isinstance(value, list):
        return [_on(device, each) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
