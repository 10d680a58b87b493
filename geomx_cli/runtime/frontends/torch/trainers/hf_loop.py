"""The loop of HF's Trainer between two steps: the state that a worker saves, and how another process returns to it."""

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_callback import ExportableState

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.loader_place import has_indices
from geomx_cli.runtime.frontends.torch.trainers import TrainingRun
from geomx_cli.runtime.frontends.torch.trainers.batch_order import BatchOrder
from geomx_cli.runtime.frontends.torch.trainers.loop_state import LOOP
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["HfLoop", "resume_through"]

_STATE = "trainer_state.json"
_HISTORY = "log_history"
_NUMBERS = (
    "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "_initial_num_input_tokens_seen",
    "initial_num_input_tokens_seen_for_session", "current_flos",
)  # fmt: skip
"""Attributes of a Trainer; each version has some of them."""
_LOSS = "_tr_loss"
"""The sum of the losses since the last log. It is an attribute of the Trainer, or before 5.6 a variable in its loop."""


class HfLoop:
    """A Trainer's loop, as an object that a state saves. Its hooks are called by the Callback.

    The Trainer itself returns to the epoch and the step: its `train` resumes from a folder that has only its own state,
    and skips the earlier batches. When it has begun, this class loads the rest of the state.
    """

    def __init__(self, trainer: Any, run: TrainingRun) -> None:
        self._trainer = trainer
        self._run = run
        self._order: BatchOrder | None = None
        self._per_epoch = 1  # steps
        self._epoch = self._step = 0
        self._returns = False
        self._history: list[str] = []

    # The Callback's.

    def begin(self, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
        """Training begins. Save from now on, or continue from the state that an earlier life has saved."""
        trainer = self._trainer
        inner = getattr(loader, "base_dataloader", loader)  # within Accelerate's, which loads a batch ahead
        if has_indices(inner) and inner.batch_sampler is not None:
            self._order = BatchOrder.put_in(inner)
            self._order.notes = not inner.num_workers
        self._per_epoch = _steps_in_epoch(trainer, loader)
        epochs, steps = divmod(trainer.state.global_step, self._per_epoch)  # of a checkpoint from which it resumes
        self._epoch, self._step = epochs - 1, 0 if trainer.args.ignore_data_skip else steps
        objects = {"optimizer": optimizer, LOOP: self}
        given = {"scheduler": scheduler, "scaler": getattr(trainer.accelerator, "scaler", None)}
        objects |= {name: each for name, each in given.items() if each is not None}
        place = self._run.keep(model, objects)
        if place.values:
            self._return_to(place)
        if not trainer.args.eval_on_start:
            self._run.begin_repeatable()

    def _return_to(self, place: State) -> None:
        self._returns = True
        self._epoch, self._step = place.values["epoch"] - 1, place.values["step"]
        self._trainer.args.eval_on_start = False  # that was before the first step
        if self._order is not None and place.values["has_order"]:
            self._order.return_to(place.part("order"), skips=False)

    def begin_epoch(self) -> None:
        """An epoch begins."""
        self._run.begin_repeatable()
        self._epoch += 1

    def end_epoch(self) -> None:
        """An epoch has ended."""
        self._step = 0

    def begin_step(self) -> None:
        """A step begins. The last step's log, evaluation and checkpoint are over, and the batches of this step are
        loaded.
        """
        self._run.end_repeatable()
        if self._returns:
            self._returns = False
            self._run.go_on()
            if self._order is not None:
                self._order.end_return()
        self._run.reach(self._epoch, self._step * self._trainer.args.gradient_accumulation_steps, self._place)
        self._step += 1

    def _place(self) -> State:
        state = State({"epoch": self._epoch, "step": self._step, "has_order": self._order is not None})
        if self._order is not None:
            state.add("order", self._order.place(self._step * self._trainer.args.gradient_accumulation_steps))
        return state

    # The saved state.

    def state_dict(self) -> dict[str, Any]:
        """The Trainer's state between two steps. Raises InvalidSettings for log values that are no numbers."""
        trainer = self._trainer
        fields = {name: value for name, value in vars(trainer.state).items() if name != _HISTORY}
        for entry in trainer.state.log_history[len(self._history) :]:
            self._history.append(_line(entry))
        return {
            "state": fields, _HISTORY: "\n".join(self._history),
            "loop_step": self._epoch * self._per_epoch + self._step,
            "numbers": {name: getattr(trainer, name) for name in _NUMBERS if hasattr(trainer, name)},
            "loss": _summed_loss(trainer), "callbacks": [each.state() for each in self._exportable()],
            "reported": self._run.step,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, in a loop that has begun."""
        trainer = self._trainer
        for name, value in state["state"].items():
            setattr(trainer.state, name, value)
        self._history = state[_HISTORY].splitlines()
        trainer.state.log_history = [json.loads(line) for line in self._history]
        for name, number in state["numbers"].items():
            setattr(trainer, name, number)
        for callback, saved in zip(self._exportable(), state["callbacks"], strict=True):
            vars(callback).update(saved.get("attributes", {}))
        self._run.step = state["reported"]
        if state["loss"] is not None:
            _add_loss(trainer, state["loss"].to(trainer.args.device))

    def _exportable(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]


def resume_through(folder: Path, found: Mapping[str, Any], trainer: Any) -> str:
    """Return a folder from which a Trainer resumes at the place that an earlier life has saved (`found`)."""
    folder.mkdir(exist_ok=True)
    # The loop computes epoch and step from the number of steps, as if no epoch had ended early.
    state = {**found["state"], "global_step": found["loop_step"], _HISTORY: []}
    (folder / _STATE).write_text(json.dumps(state, default=float))
    trainer.args.ignore_data_skip = False
    return str(folder)


def _steps_in_epoch(trainer: Any, loader: Any) -> int:
    """Epoch and step as the loop counts them."""
    try:
        batches: int = len(loader)
    except TypeError:
        return max(1, int(trainer.args.max_steps))
    return max(1, -(-batches // int(trainer.args.gradient_accumulation_steps)))


def _line(entry: Mapping[str, Any]) -> str:
    try:
        return json.dumps(entry, default=float)
    except (TypeError, ValueError) as error:
        raise InvalidSettings(f"a log value of the Trainer is no number: {error}", "log numbers") from error


def _summed_loss(trainer: Any) -> Any:
    if (own := getattr(trainer, _LOSS, None)) is not None:
        return own.detach().clone()
    frame = sys._getframe()
    while (up := frame.f_back) is not None:
        frame = up
        if frame.f_code.co_name == "_inner_training_loop" and isinstance(frame.f_locals.get("tr_loss"), torch.Tensor):
            return frame.f_locals["tr_loss"].detach().clone()
    return None


def _add_loss(trainer: Any, loss: Any) -> None:
    """The loop's sum is from an earlier life."""
    if hasattr(trainer, _LOSS):
        setattr(trainer, _LOSS, loss)
        return
    original = trainer.training_step

    @functools.wraps(original)
    def first(*args: Any, **options: Any) -> Any:
        del trainer.training_step
        return loss + original(*args, **options)

    trainer.training_step = first
