"""Frameworks that own the training loop. The optimizer takes part in the job's algorithm, and log values are reported.

Each module imports its framework, so none is imported here.
"""

import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime import script
from geomx_cli.runtime.frontends import finder
from geomx_cli.runtime.frontends.torch import load
from geomx_cli.runtime.frontends.torch.store import Store
from geomx_cli.runtime.script import reports
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.trainers.loop_state import LoopState

__all__ = ["TrainingRun"]

_HINT = "geomx launch --algo diloco -- python train.py"
_UNUSUAL = re.compile(r"[^A-Za-z0-9_./-]")
_FIELDS = ("step", "samples", "loss", "accuracy")
_LOSSES = ("loss", "train_loss", "train/loss")
_VALIDATION_LOSSES = ("eval_loss", "val_loss", "validation_loss", "valid_loss", "val/loss", "eval/loss")
_ACCURACIES = ("eval_accuracy", "val_accuracy", "val_acc", "valid_acc", "accuracy", "val/accuracy", "eval/accuracy")


class TrainingRun:
    """The time from the begin of a framework's loop to its last step. For the training thread.

    If the algorithm exchanges weights, `begin` wraps the optimizer and `finish` ends the training. If it exchanges
    gradients, DistributedDataParallel exchanges them, and both methods have no effect. So one script works with all
    algorithms.

    step: the last step whose samples were reported.
    """

    def __init__(self) -> None:
        self.step = 0
        self._state: LoopState | None = None
        self._calls = -1  # collective operations when those began that a next life repeats

    @staticmethod
    def check_launched() -> None:
        """Raise InvalidSettings in a process that geomx has not started, because its callback would do nothing."""
        if not finder.has_run():
            raise InvalidSettings("this script was not started by geomx, and has its callback", _HINT)

    @property
    def takes_local_steps(self) -> bool:
        """Whether the algorithm exchanges weights. Raises InvalidSettings before the worker has joined the job."""
        return not self._store.exchanges_gradients

    @property
    def _store(self) -> Store:
        return load.joined(script.session())

    def begin(self, model: Any, optimizers: Sequence[Any], step: int = 0, buffers: str = "local") -> None:
        """The loop begins, after `step` steps of earlier runs. All workers get the tensors of the worker of rank 0.
        Blocks until all have called this. Raises the same errors as `wrap`.
        """
        self.step = step
        if self.takes_local_steps:
            self._store.wrap(model, list(optimizers), buffers)

    @property
    def saves(self) -> bool:
        """Whether a next life of this worker could continue from the state that the loop saves."""
        return self.takes_local_steps and self._store.recovery.saves

    @property
    def folder(self) -> Path:
        """The folder of the saved state, which outlives this process; only if the run `saves`."""
        return self._store.recovery.folder

    def found(self) -> dict[str, Any] | None:
        """The state that the loop saved in an earlier life, before `keep` restores it. None if that life had begun no
        step.
        """
        from geomx_cli.runtime.frontends.torch.trainers.loop_state import saved_loop

        return saved_loop(self._store.recovery) if self.saves else None

    def give_up(self, why: str) -> None:
        """Save nothing more: this worker cannot be restarted. A warning gives the reason."""
        self._store.recovery.give_up(why)

    def keep(self, model: Any, objects: Mapping[str, Any]) -> "State":
        """After `begin`: save all objects from now on, of which one is the LOOP. If an earlier life has saved, restore
        the objects. Return the place at which that life was. Without an earlier life, the place has no values.
        """
        from geomx_cli.runtime.frontends.torch.trainers.loop_state import LoopState, ModelTensors

        for name, each in objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                self.give_up(f"the {name} is a {type(each).__name__}, which has no state_dict")
                return State()
        self._state = LoopState(self._store, {"model": ModelTensors(model, self._store.trained), **objects})
        return self._state.place

    def reach(self, epoch: int, batch: int, place: "Callable[[], State]") -> None:
        """The loop is between two steps, after so many batches of an epoch. Save if that is due."""
        if self._state is not None:
            self._state.reach(epoch, batch, place)

    def go_on(self) -> None:
        """The loop is where the earlier life was. Random numbers continue as they were there."""
        if self._state is not None:
            self._state.go_on()

    def begin_repeatable(self) -> None:
        """A next life repeats all calls from here to `end_repeatable` before it reaches this life's place."""
        if self._calls == -1:
            self._calls = self._store.collectives

    def end_repeatable(self) -> None:
        """See `begin_repeatable`. Collective operations cannot be repeated then, because the other workers have passed
        them.
        """
        if self._calls not in (-1, self._store.collectives):
            what = "the loop exchanges something when an epoch begins, as with a data set that one worker reads for all"
            self.give_up(what)
        self._calls = -1

    def finish(self) -> None:
        """The last step is taken. Contribute the remaining steps, and leave the same tensors in all workers.
        Idempotent.
        """
        if self.takes_local_steps and self._store.wraps and not self._store.finished:
            self._store.finish()

    def should_stop(self) -> bool:
        """See geomx_cli.torch.should_stop."""
        assert self._store is script.session().store
        return script.session().should_stop()

    def steps_until(self, step: int) -> int:
        """The number of steps since the last call, or since `begin`. None if steps begin anew, as in each epoch."""
        before, self.step = self.step, step
        return max(0, step - before)

    def report(self, values: Mapping[str, Any], step: int, samples: int = 0) -> None:
        """Report the loop's log values that are numbers. Training losses are reported for all workers. Frameworks
        reduce all other values over the workers, so only the worker of rank 0 reports them.

        samples: this worker's samples since the last report.
        Names that no metric may have are changed.
        """
        found = {name: number for name, value in values.items() if (number := _number(value)) is not None}
        loss = next((found.pop(name) for name in _LOSSES if name in found), None)
        if self._store.global_rank:
            found = {}
        validation = next((found.pop(name) for name in _VALIDATION_LOSSES if name in found), None)
        accuracy = next((found.pop(name) for name in _ACCURACIES if 0 <= found.get(name, math.nan) <= 1), None)
        metrics = {_metric(name): number for name, number in found.items()}
        if validation is not None:
            metrics["validation_loss"] = validation
        if metrics or samples or loss is not None or accuracy is not None:
            reports.report(step=step, samples=samples or None, loss=loss, accuracy=accuracy, **metrics)


def _number(value: Any) -> float | None:
    if hasattr(value, "numel") and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else None


def _metric(name: str) -> str:
    """A name that `report` takes."""
    usual = _UNUSUAL.sub("_", name)
    is_free = usual not in _FIELDS and not usual[:1].isdecimal() and usual[:1] not in ("", ".", "/", "-")
    return (usual if is_free else f"log/{usual}")[: reports.NAME_CHARS]
