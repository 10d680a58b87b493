"""When and how a worker evaluates the global model, and what it reports: the accuracy on the whole test set, or the
loss on a text, computed in pieces during the exchanges of rounds.
"""

import math
import time
from collections.abc import Sequence

from geomx_cli.datasets.catalog import is_iid
from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.bundled.record import Record, Score
from geomx_cli.runtime.data.samples import Samples, TextSamples
from geomx_cli.runtime.training.model import ModelAdapter
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import State, Stopwatch, WorkerAlgorithm

__all__ = ["Evaluation", "EvaluationSchedule", "divergence_warning"]

_PIECE = 500 * 28 * 28
_LEAST = 16
_WINDOWS = 16  # of a text
_ROUNDS = 20


class Evaluation:
    """Evaluates a copy of the weights taken at `start`, while training continues. For the training thread only.

    An evaluation is spread over `every` rounds, at most 20: a piece takes about as long as a wide-area round trip, so
    it does not delay the other workers.

    score: of the last completed evaluation.
    round: of the latest one started.
    seconds: spent on the latest one so far.
    """

    def __init__(self, model: ModelAdapter, test: Samples, every: int) -> None:
        self._model = model
        self._test = test
        self._of_text = isinstance(test, TextSamples)
        height, width = model.network.resized
        self._piece = _WINDOWS if self._of_text else max(_LEAST, _PIECE // (height * width))
        pieces = -(-len(test) // self._piece)
        self._per_advance = -(-pieces // max(1, min(every, _ROUNDS)))
        self._next = len(test)
        self._total = 0.0
        self.seconds = 0.0
        self.round = 0
        self.score = Score()

    @property
    def busy(self) -> bool:
        """Whether an evaluation is in progress."""
        return self._next < len(self._test)

    @property
    def test(self) -> Samples:
        """The test set."""
        return self._test

    def start(self, model: ModelAdapter, round_: int, weights: Sequence[Floats] | None = None) -> None:
        """Copy the weights after round `round_`, the model's or, if given, `weights` by tensor; an
        evaluation in progress is discarded.
        """
        self._model.copy_weights_from(model)
        for index, weight in enumerate(weights or ()):
            self._model.write_weight(index, weight)
        self.round, self._next, self._total, self.seconds = round_, 0, 0.0, 0.0

    def advance(self) -> bool:
        """Do a part of the evaluation; return True if that was the last one."""
        begun = time.monotonic()
        for _ in range(self._per_advance):
            if self.busy:
                batch = self._test.take(slice(self._next, self._next + self._piece))
                if self._of_text:
                    self._total += self._model.mean_loss(batch) * len(batch[1])
                else:
                    self._total += self._model.count_correct(batch)
                self._next += self._piece
        self.seconds += time.monotonic() - begun
        if self.busy:
            return False
        mean = self._total / len(self._test)
        self.score = Score(validation_loss=mean) if self._of_text else Score(accuracy=mean)
        return True

    def run(self, model: ModelAdapter, round_: int) -> None:
        """Evaluate synchronously."""
        self.start(model, round_)
        while not self.advance():
            pass

    def state(self) -> State:
        """Return the last score, and the evaluation in progress with its copy of the weights."""
        values = {"round": self.round, "seconds": self.seconds, "next": self._next, "total": self._total}
        score = [self.score.accuracy, self.score.validation_loss]
        state = State({**values, "score": score})
        if self.busy:
            state.add("model", self._model.state())
        return state

    def load(self, state: State) -> None:
        """Continue from a `state`."""
        values = state.values
        self.round, self.seconds = values["round"], values["seconds"]
        self._next, self._total, self.score = values["next"], values["total"], Score(*values["score"])
        if self.busy:
            self._model.load(state.part("model"))


class EvaluationSchedule:
    """Evaluates the global model every `config.eval_every` steps; never without `evaluation`. Warns of failed training,
    for which its methods take the mean loss of the last round. For the training thread only.

    count: evaluations reported.
    periodic: whether it evaluates during training.
    """

    def __init__(self, evaluation: Evaluation | None, config: TrainConfig, record: Record) -> None:
        self._evaluation = evaluation
        self._config = config
        self._record = record
        self._started = 0  # steps at the start of the latest evaluation
        self._failing = False
        self.count = 0
        self.periodic = evaluation is not None and config.eval_every > 0

    @property
    def accuracy(self) -> float:
        """The accuracy that the last complete evaluation found; 0 before the first."""
        return (self._evaluation.score.accuracy or 0.0) if self._evaluation is not None else 0.0

    def start_if_due(self, model: ModelAdapter, part: WorkerAlgorithm, steps: int) -> None:
        """Start an evaluation after `steps` steps if one is due and the global model is available."""
        if self._evaluation is None or not self.periodic or not part.is_global_round:
            return
        if not self._evaluation.busy and steps - self._started >= self._config.eval_every:
            self._started = steps
            self._evaluation.start(model, part.rounds, part.global_weights)

    def advance(self, watch: Stopwatch, loss: float) -> float | None:
        """Continue the evaluation in progress, if any. Return the accuracy if it is complete now."""
        if self._evaluation is None or not self._evaluation.busy:  # with many steps per round it spans several
            return None
        with watch("evaluation"):
            done = self._evaluation.advance()
        return self._report(self._evaluation, loss) if done else None

    def run(self, model: ModelAdapter, round_: int, loss: float) -> None:
        """Evaluate `model`, as of round `round_`, at once."""
        if self._evaluation is not None:
            self._evaluation.run(model, round_)
            self._report(self._evaluation, loss)

    def final(self, model: ModelAdapter, round_: int, loss: float) -> Score:
        """Return the score of the final weights; an empty one without an evaluation. First completes the evaluation in
        progress, if any.
        """
        if self._evaluation is None:
            return Score()
        if self._evaluation.busy:
            while not self._evaluation.advance():
                pass
            self._report(self._evaluation, loss)
        self._evaluation.run(model, round_)
        self._check_divergence(self._evaluation, loss)
        return self._evaluation.score

    def state(self) -> State:
        """Return what is known of past evaluations, and the one in progress."""
        state = State({"started": self._started, "failing": self._failing, "count": self.count})
        if self._evaluation is not None:
            state.add("evaluation", self._evaluation.state())
        return state

    def load(self, state: State) -> None:
        """Continue from a `state`."""
        self._started, self._failing = state.values["started"], state.values["failing"]
        self.count = state.values["count"]
        if self._evaluation is not None:
            self._evaluation.load(state.part("evaluation"))

    def _report(self, evaluation: Evaluation, loss: float) -> float | None:
        self.count += 1
        self._record.evaluation(evaluation.round, evaluation.score, evaluation.seconds)
        self._check_divergence(evaluation, loss)
        return evaluation.score.accuracy

    def _check_divergence(self, evaluation: Evaluation, loss: float) -> None:
        """Warn, once, if training fails."""
        rate = self._config.optimizer_params["learning_rate"]
        warning = divergence_warning(loss, evaluation.score, evaluation.test, rate, self._config.split)
        if warning and not self._failing:
            self._record.warn(warning)
        self._failing = bool(warning)


# Failed training: an unsuitable learning rate shows in the loss, or in an accuracy at chance level.

def divergence_warning(loss: float, score: Score, test: Samples, rate: float, split: str) -> str:
    """Describe the problem and the remedy, after an evaluation on the samples `test`; "" if there is none.

    loss: mean of a round, of one worker. rate: learning rate. split: data split. Chance level is what guessing
    reaches in 999 of 1000 trials; of a text, the loss of guessing among all characters.
    """
    found = score.validation_loss
    if found is not None:
        if math.isfinite(loss) and found < math.log(test.classes):
            return ""
        what = f"the loss is {loss if not math.isfinite(loss) else found:g}"
        return f"{what}: does the learning rate fit the optimizer? It is {rate:g} (--lr)"
    accuracy = score.accuracy or 0.0
    chance = 1 / test.classes + 3 * math.sqrt((test.classes - 1) / len(test)) / test.classes
    if math.isfinite(loss) and accuracy > chance:
        return ""
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"test accuracy {accuracy:.4f} is what guessing gives"
    divided = "" if is_iid(split) else f"; and the data are divided {split} (--split), which is hard"
    return f"{what}: does the learning rate fit the optimizer? It is {rate:g} (--lr){divided}"
