"""HF Trainer in a job: `Trainer(..., callbacks=[geomx.hf.Callback()])`; and log values of a loop with Accelerate."""

import functools
from typing import Any

from accelerate.tracking import GeneralTracker
from transformers import Trainer, TrainerCallback

from geomx_cli.runtime.frontends.torch.trainers import TrainingRun
from geomx_cli.runtime.frontends.torch.trainers.hf_loop import HfLoop, resume_through

__all__ = ["Callback", "Tracker"]


class Callback(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Makes a Trainer train by the job's algorithm, and shows its log values in status, dashboard and records.

    With algorithms that exchange weights, each worker takes the Trainer's steps on its part of the data. The
    optimizer's `step` exchanges weights when a round is due. After the last step all workers get the same model, before
    the Trainer evaluates or saves it. A killed worker continues at the same batch. With fsa and sync the Trainer's own
    DistributedDataParallel averages the gradients, and a killed worker ends the job. When the job is asked to stop, the
    Trainer ends after that step, with a checkpoint if it saves any.

    Args:
        buffers: See `wrap`.

    Raises:
        InvalidSettings: The script creates the Trainer outside a job.
        GeomxError: The job has failed; `Trainer.train` raises it.

    Examples:
        >>> Trainer(model, arguments, train_dataset=texts, callbacks=[geomx.hf.Callback()]).train()
    """

    def __init__(self, *, buffers: str = "local") -> None:
        self._buffers = buffers
        self._run = TrainingRun()
        self._loop: HfLoop | None = None

    def before_loop(self, trainer: Any, checkpoint: Any) -> Any:
        """The Trainer's loop is about to begin, from this checkpoint if there is one. Return the checkpoint from which
        it begins: if an earlier life of this worker has saved its state, this state takes precedence.
        """
        if not self._run.saves:
            return checkpoint
        self._loop = HfLoop(trainer, self._run)
        found = self._run.found()
        return checkpoint if found is None else resume_through(self._run.folder, found, trainer)

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Event of the Trainer."""
        self._run.check_launched()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, lr_scheduler: Any = None,
        train_dataloader: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """Event of the Trainer: checkpoints are loaded."""
        self._run.begin(model, [optimizer], state.global_step, self._buffers)
        if self._run.takes_local_steps:
            args.average_tokens_across_devices = False  # they cost a round trip before every step
        if self._loop is not None:
            self._loop.begin(model, optimizer, lr_scheduler, train_dataloader)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Event of the Trainer."""
        if self._loop is not None:
            self._loop.begin_epoch()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Event of the Trainer: the log, evaluation and checkpoint of the last step are over."""
        if self._loop is not None:
            self._loop.begin_step()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Event of the Trainer: a step's evaluation and checkpoint follow."""
        if self._run.should_stop():
            control.should_training_stop = True
            control.should_save = control.should_save or args.save_strategy != "no"
        if control.should_training_stop or state.global_step >= state.max_steps:
            self._run.finish()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Event of the Trainer: it has stopped early, or its data has ended."""
        if self._loop is not None:
            self._loop.end_epoch()
        if control.should_training_stop:
            self._run.finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Event of the Trainer."""
        self._run.finish()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Event of the Trainer, in all workers."""
        if logs and "train_runtime" in logs:
            return  # a summary of the whole training, not values of this step
        batch = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self._run.report(logs or {}, state.global_step, batch * self._run.steps_until(state.global_step))


class Tracker(GeneralTracker):  # type: ignore[misc, unused-ignore]
    """Shows the values of `accelerator.log` in status and dashboard. Accelerate logs only in the worker of rank 0.

    Args:
        batch: The number of samples in a step of this worker.

    Examples:
        >>> accelerator = Accelerator(log_with=geomx.hf.Tracker(batch=64))
        >>> accelerator.init_trackers("run")
    """

    name = "geomx"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self, batch: int = 0) -> None:
        super().__init__()
        self._batch = batch
        self._run = TrainingRun()
        self._run.check_launched()

    @property
    def tracker(self) -> TrainingRun:
        """The object that receives the values."""
        return self._run

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Hyper-parameters: not recorded."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        """Report the values that are numbers."""
        self._run.report(values, step or 0, self._batch * self._run.steps_until(step or 0))


def _prepare(kind: Any) -> None:
    """Let a Trainer with our Callback begin where an earlier life of this worker was killed."""
    original = kind._inner_training_loop

    @functools.wraps(original)
    def loop(trainer: Any, *args: Any, **options: Any) -> Any:
        own = next((each for each in trainer.callback_handler.callbacks if isinstance(each, Callback)), None)
        if own is not None:
            options["resume_from_checkpoint"] = own.before_loop(trainer, options.get("resume_from_checkpoint"))
        return original(trainer, *args, **options)

    kind._inner_training_loop = loop


_prepare(Trainer)
