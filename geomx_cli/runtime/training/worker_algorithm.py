"""The worker side of a synchronization algorithm, as used by the bundled training loop."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.ps.arrays import Array, Floats
    from geomx_cli.ps.optim.optimizer import LocalOptimizer
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = [
    "Algorithm", "Contributed", "DrainableWorkerAlgorithm", "FiniteWorkerAlgorithm", "PacedWorkerAlgorithm", "State",
    "Stopwatch", "WorkerAlgorithm",
]  # fmt: skip

# The state of training as data: named arrays and JSON values, that any file or message can hold. It imports numpy only
# to convert, as the control machine loads algorithms without it.

_VALUES = "values"


@dataclass(slots=True)
class State:
    """What one object keeps. `load` of a new object with the same configuration continues from it, bit for bit.

    values: what JSON has; floats may be infinite or NaN.
    arrays: by name. They may be the object's own memory: read them before it goes on.
    """

    values: dict[str, Any] = field(default_factory=dict)
    arrays: "dict[str, Array]" = field(default_factory=dict)

    def add(self, name: str, part: "State") -> None:
        """Include the state of a part of the object, under a name of its own."""
        self.values[name] = part.values
        self.arrays |= {f"{name}/{key}": array for key, array in part.arrays.items()}

    def part(self, name: str) -> "State":
        """Return what `add` included."""
        return State(self.values[name], self.named(name))

    def named(self, name: str) -> "dict[str, Array]":
        """Return the arrays NAME/KEY by KEY."""
        start = f"{name}/"
        return {key.removeprefix(start): array for key, array in self.arrays.items() if key.startswith(start)}

    def to_bytes(self) -> bytes:
        """Return all as one safetensors file."""
        import numpy as np
        from safetensors.numpy import save

        values = np.frombuffer(json.dumps(self.values).encode(), np.uint8)
        arrays = {f"arrays/{key}": np.ascontiguousarray(array) for key, array in self.arrays.items()}
        return save({_VALUES: values, **arrays})

    @classmethod
    def from_bytes(cls, content: bytes) -> "State":
        """Return the state of which `to_bytes` made this content."""
        from safetensors.numpy import load

        state = cls(arrays=load(content))
        values: dict[str, Any] = json.loads(state.arrays[_VALUES].tobytes())
        return cls(values, state.named("arrays"))


class Stopwatch:
    """Accumulates the seconds of a step's phases, by name."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body of a `with`."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count so many of one name's seconds, at most all, as another's."""
        moved = min(seconds, self._seconds.get(source, 0.0))
        if moved:
            self._seconds[source] -= moved
            self._seconds[target] = self._seconds.get(target, 0.0) + moved

    def take(self, but: str = "") -> dict[str, float]:
        """Return and reset the sums, rounded to 0.1 ms, of all names `but` one."""
        taken = {name: round(seconds, 4) for name, seconds in self._seconds.items() if name != but}
        self._seconds = {name: seconds for name, seconds in self._seconds.items() if name == but}
        return taken


class WorkerAlgorithm(ABC):
    """Base class of what an algorithm's `worker(client, model, config)` returns. For the training thread only.

    The loop calls `start` once, then for every batch runs one forward and backward pass and `after_step`. If that began
    a round, and `must_wait` is true, `synchronise` follows before the next batch. There is always a batch: a worker
    that has completed its epochs continues until all have, then `end` is called (FiniteWorkerAlgorithm differs). So all
    workers go through the same rounds, however many batches each has. A failure of the job is raised from any method as
    a GeomxError.

    rounds: completed.
    gradient_scale: factor of the gradient of a batch's mean loss in the backward pass.
    steps_per_round: approximate steps between two rounds.
    separate_comm_phase: whether a round's record lists the exchange after the steps, instead of within its only step.
    partial_rounds: whether a round may leave steps to later rounds.
    asynchronous: whether parties go through rounds independently.
    recorded: fields of the last round's record that only this algorithm has.
    arrived: when (monotonic) the newest result arrived, if `synchronise` does not wait for all results. Then the first
        use of a tensor of the model waits.
    optimizer: this worker's own, for the vector of all weights; None if it has none.
    kept: names of the attributes that `state` saves, JSON values.
    parts: names of the attributes that have a `state` of their own.
    """

    kept: tuple[str, ...] = ("rounds", "gradient_scale")
    parts: tuple[str, ...] = ()

    rounds: int = 0
    gradient_scale: float = 1.0
    steps_per_round: int = 1
    separate_comm_phase: bool = False
    partial_rounds: bool = False
    asynchronous: bool = False
    recorded: Mapping[str, float] = MappingProxyType({})
    arrived: float = 0.0
    optimizer: "LocalOptimizer | None" = None

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

    @abstractmethod
    def start(self) -> None:
        """Pull the initial weights from the servers; blocks until they are available."""

    @abstractmethod
    def after_step(self, samples: int, watch: Stopwatch) -> bool:
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

    def state(self) -> State:
        """Return what this part keeps while no exchange is pending, besides the model."""
        state = State({name: getattr(self, name) for name in self.kept})
        for name in self.parts:
            state.add(name, getattr(self, name).state())
        return state

    def load(self, state: State) -> None:
        """Continue from a `state` instead of `start`, once the model has its weights."""
        for name in self.kept:
            setattr(self, name, state.values[name])
        for name in self.parts:
            getattr(self, name).load(state.part(name))


class DrainableWorkerAlgorithm(WorkerAlgorithm):
    """Its workers can take part in rounds without batches. Workers of scripts do this when their script has ended. Then
    `drain` and `synchronise` alternate until no worker has anything to contribute.
    """

    @abstractmethod
    def drain(self) -> None:
        """Without a batch: begin a round with the steps not yet exchanged, or abstain from it."""


class Contributed(NamedTuple):
    """What a worker has contributed to a round that follows from time.

    steps: of its own.
    when: after a "step", while it waited for other workers ("join"), or after its last step ("drain").
    """

    steps: int
    when: Literal["step", "join", "drain"]


class PacedWorkerAlgorithm(DrainableWorkerAlgorithm):
    """Its workers take different numbers of steps in a round. So while a script's worker waits for all others in a
    collective operation, others may wait for it in a round: it asks, and takes part without further steps.

    before_round: called before this worker contributes to the round after so many, so that this can be saved.
    contributed: returns what an earlier life has contributed to the round after so many, which then is repeated; None
        if it did not contribute.
    """

    before_round: Callable[[int, Contributed], object] = staticmethod(lambda rounds, contributed: None)
    contributed: Callable[[int], Contributed | None] = staticmethod(lambda rounds: None)

    @abstractmethod
    def continue_round(self) -> None:
        """Call after `load`, when `contributed` is set."""

    @property
    @abstractmethod
    def must_join(self) -> bool:
        """Whether to `join` now, as an earlier life of this worker did while it waited after as many steps."""

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

    def skip(self) -> None:
        """Begin a round without contributing, and drop the steps not yet exchanged: others have trained without this
        worker. After some of these rounds `start` gets the newest weights. Called if the algorithm module has `skips`.
        """
        self.drain()


class Algorithm(Protocol):
    """The parts of an algorithm's module that training uses."""

    def server_optimizer(self, config: "TrainConfig") -> tuple[str, dict[str, float]] | None:
        """Return name and hyper-parameters of the roots' optimizer; None for none."""

    def worker(self, client: object, model: object, config: "TrainConfig") -> WorkerAlgorithm:
        """Return the worker part."""
