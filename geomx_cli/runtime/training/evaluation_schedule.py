"""Decides when a worker evaluates the global model, and reports what is found."""

import math

from geomx_cli.runtime.training.catalog import is_iid
from geomx_cli.runtime.training.evaluation import Evaluation, Score
from geomx_cli.runtime.training.model import ModelAdapter
from geomx_cli.runtime.training.record import Record
from geomx_cli.runtime.training.samples import Samples
from geomx_cli.runtime.training.stopwatch import Stopwatch
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import WorkerAlgorithm

__all__ = ["EvaluationSchedule", "divergence_warning"]


class EvaluationSchedule:
    """Evaluates the global model every `config.eval_every` steps; never without `evaluation`. Warns of failed training,
    for which its methods take the mean loss of the last round. For the training thread only.
    """

    def __init__(self, evaluation: Evaluation | None, config: TrainConfig, record: Record) -> None:
        self._evaluation = evaluation
        self._config = config
        self._record = record
        self._begun = 0
        self._failing = False
        self.count = 0
        self.periodic = evaluation is not None and config.eval_every > 0

    @property
    def accuracy(self) -> float:
        """The accuracy that the last complete evaluation found; 0 before the first."""
        return (self._evaluation.score.accuracy or 0.0) if self._evaluation is not None else 0.0

    def begin(self, model: ModelAdapter, part: WorkerAlgorithm, steps: int) -> None:
        """Begin an evaluation after `steps` steps if one is due and the global model is available."""
        if self._evaluation is None or not self.periodic or not part.is_global_round:
            return
        if not self._evaluation.busy and steps - self._begun >= self._config.eval_every:
            self._begun = steps
            self._evaluation.begin(model, part.rounds, part.global_weights)

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


# Detects failed training: an unsuitable learning rate shows in the loss, or in an accuracy at chance level.

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
