"""The training loop of a bundled worker: batches, steps, rounds, evaluations, and the stop condition."""

import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, SupportsFloat

from geomx_cli.runtime.algorithms._async_completion import INTERVAL, CompletionClient
from geomx_cli.runtime.training.checkpoint import Checkpoint, Checkpoints
from geomx_cli.runtime.training.evaluation import Evaluation, Score
from geomx_cli.runtime.training.evaluation_schedule import EvaluationSchedule
from geomx_cli.runtime.training.model import ModelAdapter
from geomx_cli.runtime.training.record import Record
from geomx_cli.runtime.training.samples import Batch, Prefetch, Samples
from geomx_cli.runtime.training.stop_vote import StopVote
from geomx_cli.runtime.training.stopwatch import Stopwatch
from geomx_cli.runtime.training.straggler_emulation import StragglerEmulation, factor_of
from geomx_cli.runtime.training.tensor_rounds import pull_weights
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import FiniteWorkerAlgorithm, WorkerAlgorithm

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Loop"]


@dataclass(slots=True)
class _Round:
    """The state of the round in progress. late: seconds of its steps in which results of the last one were coming."""

    times: list[dict[str, float]] = field(default_factory=list)
    losses: list[SupportsFloat] = field(default_factory=list)
    samples: int = 0
    late: float = 0.0

    def add_exchange(self, seconds: dict[str, float], *, apart: bool) -> None:
        """Add the exchange's durations, by name; the next batch, drawn meanwhile, belongs to the next step."""
        if apart or not self.times:
            self.times.append(seconds)
        else:
            self.times[-1] |= {name: spent + self.times[-1].get(name, 0.0) for name, spent in seconds.items()}


class Loop:
    """Trains `model` on `shard` to the end of the job. `evaluation` is given on global rank 0 only.

    During a round's exchange the next batch is made and a piece of the test set is evaluated. A worker that is out of
    data abstains from the others' rounds until all are, or starts over if the algorithm is not finite, so all end with
    one model. A failure of the job is raised from `run` as a GeomxError; training cannot continue after it.
    """

    def __init__(
        self, client: "Client", config: TrainConfig, *, model: ModelAdapter, part: WorkerAlgorithm, shard: Samples,
        evaluation: Evaluation | None,
    ) -> None:  # fmt: skip
        self._client = client
        self._config = config
        self._model = model
        self._part = part
        self._finite = part if isinstance(part, FiniteWorkerAlgorithm) else None
        self._shard = shard
        self._rank = client.global_rank
        is_last = self._rank == client.num_all_workers - 1
        process = client.settings.process
        factor = factor_of(config.text("slowdown"), process, client.settings.party, is_last)
        self._straggler = StragglerEmulation(factor) if factor > 1 else None
        every = config.checkpoint_every if self._rank == 0 else 0
        folder = client.settings.output_dir or client.settings.job_dir
        self._checkpoints = Checkpoints(folder, every, client.events.warn) if every else None
        self._stop_vote = StopVote(client, priority=1)
        self._async_completion = CompletionClient(client) if part.asynchronous else None
        self._watch = Stopwatch()
        self._round = _Round()
        self._steps = self._waited = 0
        self._begun: float | None = None
        self._reason = ""
        self._ended = False
        self._all_steps = config.epochs * -(-len(shard) // config.batch_size)
        self._record = Record(client, steps=self._all_steps, time_limit=config.time_limit)
        self._evaluations = EvaluationSchedule(evaluation, config, self._record)
        self._loss = 0.0
        self.samples = 0
        self.stopped = ""

    @property
    def steps(self) -> int:
        """Steps so far; a round without a batch counts as a usual round's."""
        return self._steps + self._waited

    @property
    def seconds(self) -> float:
        """Seconds since the loop was created."""
        return self._record.elapsed

    def run(self) -> None:
        """Train. Afterwards `samples` is the number of samples, `stopped` the reason for the end:
        "epochs", or if rank 0 decided, "time_limit" or "target_accuracy" there and "asked" elsewhere.
        """
        with contextlib.closing(Prefetch(self._batches())) as batches:
            batch = self._next(batches)
            while not self._ended:
                if self._drain() if batch is None else self._step(batch):
                    self._start()
                batch = None if batch is None else self._next(batches)
                if self._begun is not None and (batch is None or self._part.must_wait):
                    self._synchronise()
                batch = None if self.stopped else batch
        if self._async_completion is not None:
            self._wait_for_others(self._async_completion)
        self._part.end()
        self.stopped = self.stopped or "epochs"
        self._keep(at_end=True)

    def evaluate(self) -> Score:
        """Return the score of the final weights; an empty one if this worker does not evaluate."""
        return self._evaluations.final(self._model, self._part.rounds, self._loss)

    def _batches(self) -> Iterator[Batch]:
        for epoch in range(self._config.epochs) if self._finite else itertools.count():
            yield from self._shard.batches(
                self._config.batch_size, seed=self._config.seed, epoch=epoch, rank=self._rank
            )

    def _next(self, batches: Iterator[Batch]) -> Batch | None:
        with self._watch("get_batch"):
            return next(batches, None)

    def _step(self, batch: Batch) -> bool:
        """Train on a batch. Return True if the exchange of a round has begun."""
        begun, current = time.monotonic(), self._round
        with self._watch("forward and backward"):
            current.losses.append(self._model.forward_backward(batch, self._part.gradient_scale))
            if self._straggler is not None:
                self._model.wait_for_gradients()
                self._straggler.after(time.monotonic() - begun - self._late(begun))
        exchanging = self._part.after_step(len(batch[1]), self._watch)
        with self._watch("forward and backward"):
            self._model.wait_for_gradients()
        late = self._late(begun)
        self._watch.move(late, "forward and backward", self._exchange_name)
        current.late += late
        current.samples += len(batch[1])
        self.samples += len(batch[1])
        self._steps += 1
        current.times.append(self._watch.take())
        self._record.step(current.samples, current.losses, steps=self._steps)
        return exchanging

    def _late(self, begun: float) -> float:
        """Seconds of a step, begun at this time, in which results of the last round were still on their way."""
        return max(0.0, self._part.arrived - begun)

    @property
    def _exchange_name(self) -> str:
        return "global update" if self._part.separate_comm_phase else "global aggregate"

    def _drain(self) -> bool:
        """Take part in a round without a batch. Return True, as the exchange has begun."""
        assert self._finite is not None  # other algorithms always have a batch
        self._finite.drain()
        if not self._round.samples:
            self._waited += self._part.steps_per_round
        return True

    def _start(self) -> None:
        """Handle the start of a round's exchange."""
        stop = bool(self._reason) or (self._async_completion is not None and self._async_completion.stop_requested())
        left = 0 if self.stopped else max(0, self._all_steps - self._steps)
        self._stop_vote.begin(stop=stop and not self.stopped, unfinished=self._part.unfinished(left))
        self._begun = time.monotonic()

    def _synchronise(self) -> None:
        """Wait for the round's result and record the round."""
        accuracy = self._evaluations.advance(self._watch, self._loss)
        waiting = time.monotonic()
        with self._watch(self._exchange_name):
            self._part.synchronise()
            vote = self._stop_vote.result()
        now, current = time.monotonic(), self._round
        current.add_exchange(self._watch.take(but="get_batch"), apart=self._part.separate_comm_phase)
        loss = None
        if current.losses:
            loss = self._loss = sum(float(loss) for loss in current.losses) / len(current.losses)
        self._record.round(
            self._part.rounds, current.times, samples=current.samples, loss=loss, steps=self._steps,
            communicate=now - (self._begun or waiting) + current.late, wait=now - waiting + current.late,
            accuracy=accuracy, recorded=self._part.recorded,
        )  # fmt: skip
        self._round, self._begun = _Round(), None
        self._keep()
        self._evaluations.begin(self._model, self._part, self.steps)
        self._part.expect(vote.unfinished)
        if self._part.is_global_round:
            if vote.stop:
                self.stopped = self.stopped or self._reason or "asked"
            self._ended = not vote.unfinished or (bool(self.stopped) and not self._part.partial_rounds)
        self._reason = self._reason or self._reason_to_stop()

    def _wait_for_others(self, completion: CompletionClient) -> None:
        """In an asynchronous job, wait until all workers are done: then the global servers have the final weights."""
        completion.leave()
        pause = max(INTERVAL, self.seconds / max(1, self._evaluations.count))  # keep the evaluation rate
        due = self.seconds + pause
        while not completion.complete(stop=bool(self._reason)):
            if self.seconds >= due and self._evaluations.periodic:  # the others train meanwhile
                self._take_newest()
                self._evaluations.run(self._model, self._part.rounds, self._loss)
                due = self.seconds + pause
            self._reason = self._reason or self._reason_to_stop()
            time.sleep(INTERVAL)
        self.stopped = self.stopped or self._reason
        self._take_newest()

    def _take_newest(self) -> None:
        """Pull the newest weights. Recorded as a round, so that their accuracy has the correct time."""
        waiting = time.monotonic()
        with self._watch("global aggregate"):
            pull_weights(self._client, self._model)
            self._part.rounds += 1
        seconds = time.monotonic() - waiting
        self._record.round(
            self._part.rounds, [self._watch.take(but="get_batch")], samples=0, loss=None, steps=self._steps,
            communicate=seconds, wait=seconds, accuracy=None,
        )  # fmt: skip

    def _keep(self, *, at_end: bool = False) -> None:
        """Write a checkpoint of the global model if one is due and available."""
        steps = self.steps
        if self._checkpoints is None or not (at_end or (self._part.is_global_round and self._checkpoints.due(steps))):
            return
        weights = self._model.named_weights()
        if not at_end and (shared := self._part.global_weights) is not None:
            weights = {name: part.reshape(weights[name].shape) for name, part in zip(weights, shared, strict=True)}
        weights |= self._model.read_statistics()
        checkpoint = Checkpoint(steps, self.samples, self._part.rounds, self.seconds, weights)
        if at_end:
            self._checkpoints.write_last(checkpoint)
        else:
            self._checkpoints.write(checkpoint)

    def _reason_to_stop(self) -> str:
        if self._rank != 0:
            return ""
        config = self._config
        if config.time_limit and self._record.elapsed >= config.time_limit:
            return "time_limit"
        if config.target_accuracy and self._evaluations.accuracy >= config.target_accuracy:
            return "target_accuracy"
        return ""
