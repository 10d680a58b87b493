"""What a synchronisation algorithm does at a worker, as the bundled training loop sees it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from geomx_cli.runtime.training.model import Floats
    from geomx_cli.runtime.training.stopwatch import Stopwatch
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = ["Algorithm", "WorkerAlgorithm"]


class WorkerAlgorithm(ABC):
    """Base of what an algorithm's `worker(client, model, config)` returns. Used by the training thread only.

    The loop calls `start` once, then for every batch one forward and backward pass and `after_step`. Where that began a
    round, and `must_wait` says so, `synchronise` follows before the next batch. When no batch is left, or all stop,
    `drain` and `synchronise` follow each other until no worker has anything to contribute, then `end`. An endless part
    always has a batch. So all workers go through the same rounds, however many batches each has. A failure of the job
    comes out of any method as a GeomxError.

    rounds: completed. gradient_scale: what the gradient of a batch's mean loss is multiplied by in the backward pass.
    steps_per_round: steps between two rounds, about. separate_comm_phase: whether a round's record has its exchange
    behind its steps, and not in the only one. partial_rounds: whether a round may leave steps to later rounds.
    asynchronous: whether parties go through rounds by themselves. endless: whether a worker that has gone through its
    data as often as asked for goes on until all have. recorded: fields of the last round's record that only this
    algorithm has.
    """

    rounds: int = 0
    gradient_scale: float = 1.0
    steps_per_round: int = 1
    separate_comm_phase: bool = False
    partial_rounds: bool = False
    asynchronous: bool = False
    endless: bool = False
    recorded: Mapping[str, float] = MappingProxyType({})

    @property
    def must_wait(self) -> bool:
        """Whether the result of the round that has begun is to be taken before the next step."""
        return True

    @property
    def is_global_round(self) -> bool:
        """Whether the last round was one of all workers, not of this party alone: then there is a global model."""
        return True

    @property
    def global_weights(self) -> "Sequence[Floats] | None":
        """The global model after the last round, where that was one of all workers: 1-D arrays in the order of the
        model's tensors, which change with the next round. None where the model itself has it.
        """
        return None

    @abstractmethod
    def start(self) -> None:
        """Take the initial weights from the servers; blocks until all workers can have them."""

    @abstractmethod
    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """The backward pass on a batch of so many samples has been queued. True if the exchange of a round has
        begun; it is not waited for here. `watch` times what the part does itself.
        """

    @abstractmethod
    def drain(self) -> None:
        """There is no batch: begin a round with the steps that no round has had yet, or abstain from it."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait for the result of the round that has begun and put it into the model's weights."""

    def unfinished(self, steps_left: int) -> bool:
        """Asked when a round has begun: whether this worker will contribute to a round after the next one of all
        workers, which may be this one. `steps_left`: batches that it still has.
        """
        return steps_left > 0

    def expect(self, workers: int) -> None:  # noqa: B027 - not all parts need to know
        """A round is over: so many of the workers that took part in it said that they are unfinished."""

    def newest(self) -> None:
        """Put the newest weights of the global servers into the model, which counts as a round; blocks. Only
        asynchronous parts have it.
        """
        raise NotImplementedError

    def end(self) -> None:  # noqa: B027 - most parts have them already
        """No round follows: leave the final global weights in the model."""


class Algorithm(Protocol):
    """The parts of an algorithm's module that the training job uses."""

    def server_optimizer(self, config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
        """Name and hyper-parameters of the optimizer that the roots are to run; None for none."""

    def worker(self, client: object, model: object, config: "TrainConfig") -> WorkerAlgorithm:
        """The part in a worker."""
