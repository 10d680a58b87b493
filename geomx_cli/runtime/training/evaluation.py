"""Computes the accuracy on the whole test set, or the loss on a text, in pieces during the exchanges of rounds."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.training.model import ModelAdapter
from geomx_cli.runtime.training.samples import Samples, TextSamples

__all__ = ["Evaluation", "Score"]

_PIECE = 500 * 28 * 28
_LEAST = 16
_WINDOWS = 16  # of a text
_ROUNDS = 20


@dataclass(frozen=True)
class Score:
    """accuracy: the fraction of the test set classified correctly. validation_loss: of a text, for which an accuracy
    says little: the mean loss of a character.
    """

    accuracy: float | None = None
    validation_loss: float | None = None


class Evaluation:
    """Evaluates a copy of the weights taken at `begin`, while training continues.

    An evaluation is spread over `every` rounds, at most 20: a piece takes about as long as a wide-area round trip, so
    it does not delay the other workers. `score` is of the last completed evaluation; `round` and `seconds` are of the
    latest one begun. For the training thread only.
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
        self._seconds = 0.0
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

    @property
    def seconds(self) -> float:
        """Time spent in the latest evaluation so far."""
        return self._seconds

    def begin(self, model: ModelAdapter, round_: int, weights: Sequence[Floats] | None = None) -> None:
        """Copy the weights after round `round_`, the model's or, if given, `weights` by tensor; an
        evaluation in progress is discarded.
        """
        self._model.copy_weights_from(model)
        for index, weight in enumerate(weights or ()):
            self._model.write_weight(index, weight)
        self.round, self._next, self._total, self._seconds = round_, 0, 0.0, 0.0

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
        self._seconds += time.monotonic() - begun
        if self.busy:
            return False
        mean = self._total / len(self._test)
        self.score = Score(validation_loss=mean) if self._of_text else Score(accuracy=mean)
        return True

    def run(self, model: ModelAdapter, round_: int) -> None:
        """Evaluate synchronously."""
        self.begin(model, round_)
        while not self.advance():
            pass
