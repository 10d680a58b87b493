"""The training loop of a bundled worker: batches, steps, rounds, evaluations, and the stop condition."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from geomx_cli.contract.settings import factor_of
from geomx_cli.core.units import counted
from geomx_cli.runtime.algorithms._async_completion import INTERVAL, CompletionClient
from geomx_cli.runtime.bundled.checkpoint import Checkpoint, Checkpoints
from geomx_cli.runtime.bundled.earlier_job import EarlierJob
from geomx_cli.runtime.bundled.evaluation import Evaluation, EvaluationSchedule
from geomx_cli.runtime.bundled.position import Position, RoundProgress
from geomx_cli.runtime.bundled.record import Record, Score
from geomx_cli.runtime.bundled.straggler_emulation import StragglerEmulation
from geomx_cli.runtime.data.epochs import Epochs
from geomx_cli.runtime.data.samples import Batch, Prefetch
from geomx_cli.runtime.training.model import ModelAdapter
from geomx_cli.runtime.training.stop_vote import StopVote, Vote
from geomx_cli.runtime.training.tensor_rounds import TensorRounds
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import (
    FiniteWorkerAlgorithm,
    PacedWorkerAlgorithm,
    State,
    Stopwatch,
    WorkerAlgorithm,
)  # fmt: skip
from geomx_cli.runtime.training.worker_state import WorkerState

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Loop"]


class Loop:
    """Trains `model` on the batches of `epochs` to the end of the job. `evaluation` is given on global rank 0 only.

    is_asked: whether this worker has learnt that the job is asked to stop; all then stop in the same round.
    position: where training stands. `begin`, or `load`, comes before the first step.
    recovery: where the loop saves its state; None for nowhere.
    earlier: the job from whose model this one goes on; counts go on too.

    During a round's exchange the next batch is made and a piece of the test set is evaluated. A worker that is out of
    data abstains from the others' rounds until all are, or starts over if the algorithm is not finite, so all end with
    one model. A failure of the job is raised as a GeomxError; training cannot continue after it.
    """

    def __init__(
        self, client: "Client", config: TrainConfig, *, model: ModelAdapter, part: WorkerAlgorithm, epochs: Epochs,
        evaluation: Evaluation | None, recovery: WorkerState | None = None, earlier: EarlierJob | None = None,
        is_asked: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.position = Position()
        self._is_asked = is_asked
        self._recovery = recovery
        self._client = client
        self._config = config
        self._model = model
        self._part = part
        self._finite = part if isinstance(part, FiniteWorkerAlgorithm) else None
        if self._finite is not None and not part.asynchronous:
            client.skip_missed()
        self._epochs = epochs
        self._rank = client.global_rank
        is_last = self._rank == client.num_all_workers - 1
        process = client.settings.process
        factor = factor_of(config.text("slowdown"), process, client.settings.party, is_last)
        if isinstance(part, PacedWorkerAlgorithm) and recovery is not None:
            part.before_round, part.contributed = recovery.contribute, recovery.contributed
        self._straggler = StragglerEmulation(factor) if factor > 1 else None
        every = config.save_every if self._rank == 0 else 0
        folder = client.settings.output_dir or client.settings.job_dir
        self._checkpoints = Checkpoints(folder, every, client.events.warn) if every else None
        self._stop_vote = StopVote(client, priority=1)
        self._async_completion = CompletionClient(client) if part.asynchronous else None
        self._watch = Stopwatch()
        self._prefetch: Prefetch | None = None
        self._batch: Batch | None = None  # the next one
        self._exchange_began: float | None = None
        self._earlier = earlier
        before = earlier.manifest.seconds if earlier is not None else 0.0
        self._record = Record(client, steps=epochs.steps, time_limit=config.time_limit, before=before)
        self._evaluations = EvaluationSchedule(evaluation, config, self._record)

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self._record.elapsed

    @property
    def all_steps(self) -> int:
        """Steps so far, with those of jobs before this one."""
        return self.position.all_steps + (self._earlier.manifest.step if self._earlier is not None else 0)

    @property
    def exchanging(self) -> bool:
        """Whether the exchange of a round is pending."""
        return self._exchange_began is not None

    def run(self) -> None:
        """Train to the end. Position describes the values after this."""
        try:
            while self.advance():
                pass
        finally:
            self.close()
        self._save()
        if self._async_completion is not None:
            self._wait_for_others(self._async_completion)
        self._part.end()
        self.position.stopped = self.position.stopped or "epochs"
        self._write_checkpoint(at_end=True)

    def advance(self) -> bool:
        """Train on a batch, or without one take part in a round, and wait for the round's result once it is due. Return
        whether another round follows.
        """
        position = self.position
        if self._prefetch is None:
            self._prefetch = Prefetch(self._batches_left())
            self._batch = self._next_batch(self._prefetch)
        self._save()
        if position.ended:
            return False
        if self._drain() if self._batch is None else self._step(self._batch):
            self._open_round()
        if self._batch is not None:
            self._batch = self._next_batch(self._prefetch)
        if self.exchanging and (self._batch is None or self._part.must_wait):
            self._synchronise()
        if position.stopped:
            self._batch = None
        return not position.ended

    def close(self) -> None:
        """End the thread that makes batches."""
        if self._prefetch is not None:
            self._prefetch.close()

    def evaluate(self) -> Score:
        """Return the score of the final weights; an empty one if this worker does not evaluate."""
        return self._evaluations.final(self._model, self._part.rounds, self.position.loss)

    def state(self) -> State:
        """Return all that another loop, with the same arguments, continues from; only while none is `exchanging`.

        Left out: what only describes the present, as smoothed rates, and what the servers keep.
        """
        assert not self.exchanging
        self.position.seconds = self.seconds
        state = State()
        state.add("position", self.position.state())
        state.add("model", self._model.state())
        state.add("algorithm", self._part.state())
        state.add("evaluations", self._evaluations.state())
        return state

    def begin(self) -> None:
        """Start the algorithm, with the counts and the worker's optimizer of the job before, if there is one."""
        self._part.start()
        if self._earlier is not None:
            self.position.samples = self._earlier.share_of_samples(self._rank, self._client.num_all_workers)
            self._part.rounds = self._earlier.manifest.rounds
            if self._part.optimizer is not None:
                self._earlier.load_optimizer(self._part.optimizer, self._model)

    def load(self, state: State) -> None:
        """Continue from a `state`, in place of `begin`. Call before the first step."""
        self.position = Position.of(state.part("position"))
        self._record.continue_from(self.position.seconds)
        self._model.load(state.part("model"))
        self._part.load(state.part("algorithm"))
        if isinstance(self._part, PacedWorkerAlgorithm):
            self._part.continue_round()
        self._evaluations.load(state.part("evaluations"))

    def _save(self) -> None:
        """Save the state if that is due. Between this and the next contribution the servers are told nothing else."""
        rounds = self._part.rounds
        if self._recovery is None or self.exchanging or not self._recovery.is_due(rounds):
            return
        self._client.await_rounds()  # some algorithms do not wait for all results
        self._recovery.save(rounds, self.state(), self._client.recovery.state())

    def _batches_left(self) -> Iterator[Batch]:
        """Yield the batches after those of `position`."""
        if not self.position.stopped:
            yield from self._epochs.batches(self.position.steps, endless=self._finite is None)

    def _next_batch(self, batches: Iterator[Batch]) -> Batch | None:
        with self._watch("get_batch"):
            return next(batches, None)

    def _step(self, batch: Batch) -> bool:
        """Train on a batch. Return True if the exchange of a round has begun."""
        begun, position, current = time.monotonic(), self.position, self.position.round
        self._model.reseed((self._config.seed, self._rank, position.steps))
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
        position.samples += len(batch[1])
        position.steps += 1
        current.times.append(self._watch.take())
        self._record.step(current.samples, current.losses, steps=position.steps)
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
        if not self.position.round.samples:
            self.position.waited += self._part.steps_per_round
        return True

    def _open_round(self) -> None:
        """Vote in the round whose exchange has begun."""
        position = self.position
        elsewhere = self._async_completion is not None and self._async_completion.stop_requested()
        self._look_for_reason()
        if not position.reason and self._is_asked():
            position.reason = "asked"
        stop = bool(position.reason) or elsewhere
        left = 0 if position.stopped else max(0, self._epochs.steps - position.steps)
        self._stop_vote.begin(stop=stop and not position.stopped, unfinished=self._part.unfinished(left))
        self._exchange_began = time.monotonic()

    def _synchronise(self) -> None:
        """Wait for the round's result and record the round."""
        position, current = self.position, self.position.round
        accuracy = self._evaluations.advance(self._watch, position.loss)
        waiting = time.monotonic()
        with self._watch(self._exchange_name):
            self._part.synchronise()
            vote = self._stop_vote.result()
            if self._client.has_missed:
                vote = self._catch_up()
        now = time.monotonic()
        current.add_exchange(self._watch.take(but="get_batch"), apart=self._part.separate_comm_phase)
        loss = current.loss
        if loss is not None:
            position.loss = loss
        self._record.round(
            self._part.rounds, current.times, samples=current.samples, total=position.samples, loss=loss,
            steps=position.steps,
            communicate=now - (self._exchange_began or waiting) + current.late, wait=now - waiting + current.late,
            accuracy=accuracy, recorded=self._part.recorded,
        )  # fmt: skip
        position.round, self._exchange_began = RoundProgress(), None
        self._write_checkpoint()
        self._evaluations.start_if_due(self._model, self._part, position.all_steps)
        self._part.expect(vote.unfinished)
        if self._part.is_global_round:
            if vote.stop:
                position.stopped = position.stopped or position.reason or "asked"
            position.ended = not vote.unfinished or (bool(position.stopped) and not self._part.partial_rounds)

    def _catch_up(self) -> Vote:
        """Other parties have trained without this one, which was left out (`--party-loss out`). Abstain from rounds
        until this party takes part again, and skip their batches. Then get the newest weights. Return the last vote.
        """
        assert self._finite is not None
        position, first = self.position, self._part.rounds
        while True:
            self._finite.skip()
            self._look_for_reason()
            rounds = self._part.rounds - first + 1
            skipped = min(rounds * self._part.steps_per_round, self._epochs.steps - position.steps)
            left = self._epochs.steps - position.steps - skipped
            self._stop_vote.begin(stop=bool(position.reason), unfinished=self._part.unfinished(left))
            self._part.synchronise()
            self._client.await_rounds()
            vote = self._stop_vote.result()
            if not self._client.has_missed:
                break
        alone = vote.voters == (self._client.party_index,)  # the others have left: they have finished, or stopped
        if alone:  # the last round was none of theirs
            skipped = min((rounds - 1) * self._part.steps_per_round, skipped)
        self._part.start()
        position.skipped += self._epochs.samples(position.steps, position.steps + skipped)
        position.steps += skipped
        self.close()
        self._prefetch = self._batch = None
        self._client.events.warn(
            f"this worker's party was left out for {counted(rounds, 'round')}: the worker skips"
            f" {counted(skipped, 'batch')}, and drops its steps since the last round of all parties"
        )
        return Vote(vote.stop, 0 if alone else vote.unfinished, vote.voters)

    def _wait_for_others(self, completion: CompletionClient) -> None:
        """In an asynchronous job, wait until all workers are done: then the global servers have the final weights."""
        position = self.position
        completion.leave()
        pause = max(INTERVAL, self.seconds / max(1, self._evaluations.count))  # keep the evaluation rate
        due = self.seconds + pause
        self._look_for_reason()
        while not completion.complete(stop=bool(position.reason)):
            if self.seconds >= due and self._evaluations.periodic:  # the others train meanwhile
                self._pull_newest()
                self._evaluations.run(self._model, self._part.rounds, position.loss)
                due = self.seconds + pause
            self._look_for_reason()
            time.sleep(INTERVAL)
        position.stopped = position.stopped or position.reason
        self._pull_newest()

    def _pull_newest(self) -> None:
        """Pull the newest weights. Recorded as a round, so that their accuracy has the correct time."""
        waiting = time.monotonic()
        with self._watch("global aggregate"):
            TensorRounds(self._client, self._model).pull()
            self._part.rounds += 1
        seconds = time.monotonic() - waiting
        self._record.round(
            self._part.rounds, [self._watch.take(but="get_batch")], samples=0, total=self.position.samples, loss=None,
            steps=self.position.steps, communicate=seconds, wait=seconds, accuracy=None,
        )  # fmt: skip

    def _write_checkpoint(self, *, at_end: bool = False) -> None:
        """Write a checkpoint of the global model if one is due and available."""
        position, checkpoints = self.position, self._checkpoints
        if checkpoints is None:
            return
        due = self._part.is_global_round and position.all_steps - position.checkpointed >= checkpoints.every
        if not (at_end or due):
            return
        weights = self._model.named_weights()
        if not at_end and (shared := self._part.global_weights) is not None:
            weights = {name: part.reshape(weights[name].shape) for name, part in zip(weights, shared, strict=True)}
        weights |= self._model.read_statistics()
        checkpoint = Checkpoint(self.all_steps, position.samples, self._part.rounds, self.seconds, weights)
        if at_end:
            checkpoints.write_last(checkpoint)
        else:
            position.checkpointed = position.all_steps
            checkpoints.write(checkpoint)

    def _look_for_reason(self) -> None:
        """On global rank 0, have all stop once there is a reason."""
        position, config = self.position, self._config
        if position.reason or self._rank != 0:
            return
        if config.time_limit and self.seconds >= config.time_limit:
            position.reason = "time_limit"
        elif config.target_accuracy and self._evaluations.accuracy >= config.target_accuracy:
            position.reason = "target_accuracy"
