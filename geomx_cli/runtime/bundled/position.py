"""Where a bundled worker's training stands, as data."""

from dataclasses import dataclass, field
from typing import SupportsFloat

from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["Position", "RoundProgress"]


@dataclass(slots=True)
class RoundProgress:
    """The round in progress.

    times: seconds by name, for each step.
    losses: of the steps; a framework may still be computing them.
    samples: of the steps.
    late: seconds of its steps in which results of the last round were coming.
    """

    times: list[dict[str, float]] = field(default_factory=list)
    losses: list[SupportsFloat] = field(default_factory=list)
    samples: int = 0
    late: float = 0.0

    @property
    def loss(self) -> float | None:
        """The mean loss of the steps; None without one. Waits for the framework."""
        return sum(float(loss) for loss in self.losses) / len(self.losses) if self.losses else None

    def add_exchange(self, seconds: dict[str, float], *, apart: bool) -> None:
        """Add the exchange's durations, by name; the next batch, drawn meanwhile, belongs to the next step."""
        if apart or not self.times:
            self.times.append(seconds)
        else:
            self.times[-1] |= {name: spent + self.times[-1].get(name, 0.0) for name, spent in seconds.items()}


@dataclass(slots=True)
class Position:
    """What a worker's loop counts and has decided; only `Loop` changes it.

    steps: of this worker, one for each batch, so they tell the next batch: data order depends only on (seed, epoch,
        rank).
    waited: steps that rounds without a batch stand for.
    samples: that this worker has trained on.
    skipped: samples of the batches that this worker has skipped, because its party was left out.
    loss: mean of this worker's last round with a batch.
    seconds: of training, at the last `Loop.state`.
    checkpointed: `steps` and `waited` at the last checkpoint.
    reason: why this worker asks all to stop: "asked", as the job is asked to, or on global rank 0 "time_limit" or
        "target_accuracy"; "" if it does not.
    stopped: why no more batches are taken: `reason`, "asked" on other workers, "epochs" at the end; "" until then.
    ended: no round follows.
    """

    steps: int = 0
    waited: int = 0
    samples: int = 0
    skipped: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    checkpointed: int = 0
    reason: str = ""
    stopped: str = ""
    ended: bool = False
    round: RoundProgress = field(default_factory=RoundProgress)

    @property
    def all_steps(self) -> int:
        """Steps so far; a round without a batch counts as a usual round's."""
        return self.steps + self.waited

    def state(self) -> State:
        """Return all fields as values. Waits for the losses."""
        values = {name: getattr(self, name) for name in self.__slots__ if name != "round"}
        current = self.round
        losses = [float(loss) for loss in current.losses]
        values["round"] = {
            "times": current.times, "losses": losses, "samples": current.samples, "late": current.late
        }  # fmt: skip
        return State(values)

    @classmethod
    def of(cls, state: State) -> "Position":
        """Return the position of a `state`."""
        return cls(**{**state.values, "round": RoundProgress(**state.values["round"])})
