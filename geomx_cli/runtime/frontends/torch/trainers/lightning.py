"""Lightning in a job: `Trainer(strategy=geomx.lightning.Strategy())`, or the callback with Lightning's DDP."""

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.callbacks import Callback as LightningCallback
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import DDPStrategy

from geomx_cli.runtime.frontends.torch.trainers import TrainingRun
from geomx_cli.runtime.frontends.torch.trainers.lightning_loop import LightningLoop

__all__ = ["Callback", "Strategy"]


class Callback(LightningCallback):  # type: ignore[misc, unused-ignore]
    """Makes a Trainer with DDP train by the job's algorithm, and shows its log values in status, dashboard and records.

    With algorithms that exchange weights, each worker takes the Trainer's steps on its part of the data. The
    optimizer's `step` exchanges weights when a round is due. After the last step all workers get the same model, before
    the Trainer validates or saves it. A killed worker continues at the same batch. With fsa and sync
    DistributedDataParallel averages the gradients, and a killed worker ends the job. When the job is asked to stop, the
    Trainer ends after that step, as with `trainer.should_stop`.

    Args:
        buffers: See `wrap`.

    Raises:
        InvalidSettings: `fit` runs outside a job.
        GeomxError: The job has failed; `fit` raises it.
    """

    def __init__(self, *, buffers: str = "local") -> None:
        self._buffers = buffers
        self._run = TrainingRun()
        self._loop: LightningLoop | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Hook of the Trainer."""
        self._run.check_launched()
        if stage == "fit":
            self._loop = LightningLoop(trainer, self._run)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook of the Trainer: checkpoints are loaded."""
        self._run.begin(pl_module, trainer.optimizers, buffers=self._buffers)
        loop = trainer.fit_loop.epoch_loop
        if hasattr(loop, "_broadcast_sigterm_tensor"):  # Lightning 2.6: a round trip before every batch
            loop._broadcast_sigterm_tensor = _nothing  # each worker gets SIGTERM itself, and the loop then ends
        self._loops.begin(pl_module)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook of the Trainer."""
        self._loops.begin_epoch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Hook of the Trainer: a step's validation and checkpoint follow."""
        if self._run.should_stop():
            trainer.should_stop = True
        if _is_last(trainer):
            self._run.finish()
        self._loops.samples += getattr(trainer.train_dataloader, "batch_size", None) or 1
        if trainer.global_step and trainer.global_step % trainer.log_every_n_steps == 0:
            # Automatic optimization gives the loss itself, or the object that `training_step` returned with it.
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            values = {**trainer.callback_metrics, **({} if loss is None else {"loss": loss})}
            self._run.report(values, trainer.global_step, self._loops.samples)
            self._loops.samples = 0

    @property
    def _loops(self) -> LightningLoop:
        assert self._loop is not None
        return self._loop

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook of the Trainer: another callback may have stopped it since the last batch."""
        if not trainer.sanity_checking and _is_last(trainer):
            self._run.finish()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Hook of the Trainer."""
        if not trainer.sanity_checking:
            self._run.report(trainer.callback_metrics, trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Hook of the Trainer."""
        self._run.finish()


class Strategy(DDPStrategy):  # type: ignore[misc, unused-ignore]
    """DDP over the workers of the job, with the `Callback`.

    `devices` and `num_nodes` of the Trainer need not be given: `geomx launch` has started a process for each worker.

    Args:
        buffers: See `wrap`.
        options: The options of DDPStrategy.

    Examples:
        >>> lightning.Trainer(strategy=geomx.lightning.Strategy(), max_epochs=1).fit(module, loader)
    """

    strategy_name = "geomx"

    def __init__(self, *, buffers: str = "local", **options: Any) -> None:
        super().__init__(cluster_environment=_Job(), **options)
        self._callback = Callback(buffers=buffers)

    @property
    def root_device(self) -> Any:
        """This worker's device. With a GPU, the worker sees no other GPU."""
        devices = self.parallel_devices or []
        return devices[self.local_rank % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This worker's part of the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def connect(self, model: Any) -> None:
        """The Trainer begins: its callbacks are complete."""
        super().connect(model)
        trainer = model.trainer
        if not any(isinstance(each, Callback) for each in trainer.callbacks):
            trainer.callbacks.insert(0, self._callback)


class _Job(ClusterEnvironment):  # type: ignore[misc, unused-ignore]
    """The workers that `geomx launch` has started."""

    creates_processes_externally = True

    @staticmethod
    def detect() -> bool:
        return "GEOMX_SCRIPT_PROCESS" in os.environ

    main_address = property(lambda self: os.environ["MASTER_ADDR"])
    main_port = property(lambda self: int(os.environ["MASTER_PORT"]))

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def local_rank(self) -> int:
        return int(os.environ["LOCAL_RANK"])

    def node_rank(self) -> int:
        return int(os.environ["GROUP_RANK"])

    def set_world_size(self, size: int) -> None:
        """The job's value does not change."""

    def set_global_rank(self, rank: int) -> None:
        """The job's value does not change."""


def _nothing() -> None:
    pass


def _is_last(trainer: Any) -> bool:
    """Whether no step follows."""
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    if trainer.should_stop and trainer.fit_loop._can_stop_early:
        return True
    ends = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
    return bool(ends and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch)
