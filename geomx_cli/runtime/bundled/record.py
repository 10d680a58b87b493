"""A training worker's reports: an event for each round in its log, and its telemetry."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, SupportsFloat

from geomx_cli.core.events import Evaluated, RoundCompleted, StateChanged, WarningRaised

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Record", "Score"]

COMPUTING = ("forward and backward", "local update")
_SMOOTHING = 0.05
_REPORT_EVERY = 1.0


@dataclass(frozen=True)
class Score:
    """The quality of a model on the test set.

    accuracy: the fraction of images classified correctly.
    validation_loss: of a text, for which an accuracy says little: the mean loss of a character.
    """

    accuracy: float | None = None
    validation_loss: float | None = None


class Record:
    """Writes to the client's event log and telemetry; for the training thread only.

    steps: batches of this worker, in this job.
    before: seconds of training of the jobs from whose model this one goes on.
    """

    def __init__(self, client: "Client", *, steps: int, time_limit: float, before: float = 0.0) -> None:
        self._client = client
        self._steps = steps
        self._time_limit = time_limit
        self._started = self._last = self._reported = time.monotonic()
        self._before = before
        self.continue_from(before)
        self._recent = [0.0, 0.0, 0.0]
        self._bytes = self._count_bytes()
        client.events.write(StateChanged(state="training"))

    def continue_from(self, seconds: float) -> None:
        """Begin `elapsed` at the seconds that earlier processes have trained."""
        self._started = self._last - seconds

    @property
    def elapsed(self) -> float:
        """Seconds since training began."""
        return time.monotonic() - self._started

    def round(
        self, number: int, times: list[dict[str, float]], *, samples: int, total: int, loss: float | None, steps: int,
        communicate: float, wait: float, accuracy: float | None, recorded: Mapping[str, float] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Record a complete round. `times`: seconds of each local step by name; `total`, `steps`: samples and steps of
        all rounds so far.

        loss: None if this worker trained on no batch in the round. recorded: the algorithm's own metrics.
        """
        before, self._bytes = self._bytes, self._count_bytes()
        self._client.events.write(
            RoundCompleted(
                num_iters=number,
                times={str(step): entry for step, entry in enumerate(times)},
                num_samples=samples,
                total_time=self.elapsed,
                bytes_sent=self._bytes[0] - before[0],
                bytes_received=self._bytes[1] - before[1],
                compute=round(sum(entry.get(name, 0.0) for entry in times for name in COMPUTING), 4),
                first_step=round(sum(times[0].values()), 4) if times else None,
                communicate=round(communicate, 4),
                wait=round(wait, 4),
                loss=loss,
                accuracy=accuracy,
                recorded=dict(recorded),
                samples=total,
            )
        )
        self._recent = self._report(samples, wait, steps, loss)
        self._last = self._reported
        self._client.report(round=number, **({} if accuracy is None else {"accuracy": accuracy}))

    def step(self, samples: int, losses: Sequence[SupportsFloat], *, steps: int) -> None:
        """Report a step in a round that has trained on `samples` samples so far, once a second: a round may take
        minutes. `losses`: of the round's steps.
        """
        if time.monotonic() - self._reported >= _REPORT_EVERY:
            self._report(samples, 0.0, steps, sum(map(float, losses)) / len(losses))

    def evaluation(self, round_: int, score: Score, seconds: float) -> None:
        """Record the score of the weights after round `round_`."""
        event = Evaluated(
            round=round_, accuracy=score.accuracy, validation_loss=score.validation_loss, seconds=round(seconds, 4)
        )
        self._client.events.write(event)
        if score.accuracy is not None:
            self._client.report(accuracy=score.accuracy)

    def warn(self, message: str) -> None:
        """Record a warning for the user, that the result may be of no use."""
        self._client.events.write(WarningRaised(message=message, affects_result=True))

    def _report(self, samples: int, wait: float, steps: int, loss: float | None) -> list[float]:
        """Set the telemetry; return samples, seconds of waiting and seconds, smoothed over rounds."""
        self._reported = now = time.monotonic()
        # Numerators and denominator are smoothed separately: rounds that cross no WAN are much shorter than others.
        newest = (samples, wait, max(now - self._last, 1e-9))
        recent = [old * (1 - _SMOOTHING) + new for old, new in zip(self._recent, newest, strict=True)]
        progress = self._progress(steps)
        left = (self.elapsed - self._before) * (1 - progress) / progress if progress else 0.0
        self._client.report(
            state="training", samples_per_s=round(recent[0] / recent[2], 1),
            waiting=round(min(1.0, recent[1] / recent[2]), 4), progress=round(progress, 4), left_s=round(left, 1),
            **({} if loss is None else {"loss": loss}),
        )  # fmt: skip
        return recent

    def _progress(self, steps: int) -> float:
        by_time = self.elapsed / self._time_limit if self._time_limit else 0.0
        return min(1.0, max(steps / self._steps if self._steps else 1.0, by_time))

    def _count_bytes(self) -> tuple[int, int]:
        counts = self._client.traffic()
        return counts.lan[0] + counts.wan[0], counts.lan[1] + counts.wan[1]
