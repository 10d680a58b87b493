"""The scalars of a job's events, under the same tags for TensorBoard, W&B and MLflow."""

from collections.abc import Iterator
from typing import NamedTuple

from geomx_cli.core.events import VALIDATION_LOSS, Evaluated, Event, ProcessFinished, Reported, Telemetry

__all__ = ["Scalar", "Scalars"]

NAMES = ("loss", "samples_per_s", "waiting")


class Scalar(NamedTuple):
    """step: a round of the bundled job, or a script's own step. when: see JobClock."""

    tag: str
    value: float
    step: int
    when: float


class Scalars:
    """Tags: accuracy, validation_loss, and loss/PROCESS, samples_per_s/PROCESS, waiting/PROCESS and wan_MB/PROCESS; of
    scripts accuracy/PROCESS, and metric/NAME/PROCESS for metrics of their own: one named "loss" is not the loss.
    """

    def __init__(self) -> None:
        self._rounds: dict[str, int] = {}

    def of(self, process: str, event: Event) -> Iterator[Scalar]:
        """Yield the scalars of an event, which may be NaN or infinite."""
        for tag, value, step in self._values(process, event):
            if value is not None and step is not None:
                yield Scalar(tag.replace(":", "-"), value, step, event.time)

    def _values(self, process: str, event: Event) -> Iterator[tuple[str, float | None, int | None]]:
        match event:
            case Evaluated(round=number) | ProcessFinished(rounds=number):
                yield "accuracy", event.accuracy, number
                yield VALIDATION_LOSS, event.validation_loss, number
            case Telemetry(round=number) if number != self._rounds.get(process):
                self._rounds[process] = number
                for name in NAMES:
                    yield f"{name}/{process}", getattr(event, name), number
                if event.bytes is not None and any(event.bytes.wan):
                    yield f"wan_MB/{process}", sum(event.bytes.wan) / 1e6, number
            case Reported(step=step):
                for name in ("loss", "accuracy", "samples_per_s"):
                    yield f"{name}/{process}", getattr(event, name), step
                for name, value in event.metrics.items():
                    yield f"metric/{name}/{process}", value, step
