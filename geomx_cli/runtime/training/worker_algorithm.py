"""The worker side of a synchronization algorithm, as used by the bundled training loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Floats
    from geomx_cli.ps.optim.optimizer import LocalOptimizer
    from geomx_cli.runtime.training.stopwatch import Stopwatch
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = ["Algorithm", "DrainableWorkerAlgorithm", "FiniteWorkerAlgorithm", "PacedWorkerAlgorithm", "WorkerAlgorithm"]


class WorkerAlgorithm(ABC):
    """Base class of what an algorithm's `worker(client, model, config)` returns. For the training thread only.

    The loop calls `start` once, then for every batch runs one forward and backward pass and `after_step`. If that began
    a round, and `must_wait` is true, `synchronise` follows before the next batch. There is always a batch: a worker
    that has completed its epochs continues until all have, then `end` is called (FiniteWorkerAlgorithm differs). So all
    workers go through the same rounds, however many batches each has. A failure of the job is raised from any method as
    a GeomxError.

    rounds: completed. gradient_scale: factor of the gradient of a batch's mean loss in the backward pass.
    steps_per_round: approximate steps between two rounds. separate_comm_phase: whether a round's record has its
    exchange after its steps, rather than in the only step. partial_rounds: whether a round may leave steps to later
    rounds. asynchronous: whether parties go through rounds independently. recorded: fields of the last round's record
    that only this algorithm has. arrived: when (monotonic) the newest result has come, if `synchronise` does not wait
    for all: then uses of the model do.
    """

    rounds: int = 0
    gradient_scale: float = 1.0
    steps_per_round: int = 1
    separate_comm_phase: bool = False
    partial_rounds: bool = False
    asynchronous: bool = False
    recorded: Mapping[str, float] = MappingProxyType({})
    arrived: float = 0.0

    @property
    def must_wait(self) -> bool:
        """Whether to wait for the pending round's result before the next step."""
        return True

    @property
    def is_global_round(self) -> bool:
        """Whether the last round included all workers, not just this party: then there is a global model."""
        return True

    @property
    def global_weights(self) -> "Sequence[Floats] | None":
        """The global model after the last round, if that included all workers: 1-D arrays in the order of the
        model's tensors, which change with the next round. None if the model itself holds it.
        """
        return None

    @property
    def optimizer(self) -> "LocalOptimizer | None":
        """This worker's own optimizer, whose slot (0, 0) is the vector of all weights; None if it has none."""
        return None

    @abstractmethod
    def start(self) -> None:
        """Pull the initial weights from the servers; blocks until they are available."""

    @abstractmethod
    def after_step(self, samples: int, watch: "Stopwatch") -> bool:
        """Handle a queued backward pass on a batch of `samples` samples. Return True if the exchange of a round has
        begun; does not wait for it. `watch` times the algorithm's own work.
        """

    @abstractmethod
    def synchronise(self) -> None:
        """Wait for the pending round's result and write it to the model's weights."""

    def unfinished(self, steps_left: int) -> bool:
        """Called when a round has begun. Return whether this worker will contribute to a round after the next one of
        all workers, which may be this one. `steps_left`: batches that it still has.
        """
        return steps_left > 0

    def expect(self, workers: int) -> None:  # noqa: B027 - not all parts need to know
        """Called after a round with the number of its workers that declared themselves unfinished."""

    def end(self) -> None:  # noqa: B027 - most parts have them already
        """Leave the final global weights in the model; no round follows."""


class DrainableWorkerAlgorithm(WorkerAlgorithm):
    """Its workers can take part in rounds without batches: those of scripts do once their script ends. Then `drain` and
    `synchronise` alternate until no worker has anything to contribute.
    """

    @abstractmethod
    def drain(self) -> None:
        """Without a batch: begin a round with the steps not yet exchanged, or abstain from it."""


class PacedWorkerAlgorithm(DrainableWorkerAlgorithm):
    """Its workers take different numbers of steps in a round. So while a script's worker waits for all others in a
    collective operation, others may wait for it in a round: it asks, and takes part without further steps.
    """

    @abstractmethod
    def awaited(self) -> "Future[bool]":
        """Ask whether another worker has ended its steps of this round."""

    @abstractmethod
    def join(self) -> None:
        """Begin the round as `drain` does, though steps follow. `synchronise` then leaves the model's weights as they
        are, since the script may be evaluating it, until `resume`.
        """

    @abstractmethod
    def waited(self, seconds: float) -> None:
        """That was no time of a step."""

    @abstractmethod
    def resume(self) -> None:
        """Before each step: write the newest weights, if the model does not have them."""


class FiniteWorkerAlgorithm(DrainableWorkerAlgorithm):
    """Its workers also stop taking batches in the bundled loop, once they have completed their epochs, or all stop."""


class Algorithm(Protocol):
    """The parts of an algorithm's module that training uses."""

    def server_optimizer(self, config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
        """Return name and hyper-parameters of the roots' optimizer; None for none."""

    def worker(self, client: object, model: object, config: "TrainConfig") -> WorkerAlgorithm:
        """Return the worker part."""
