"""Detects failed training: an unsuitable learning rate shows in the loss, or in an accuracy at chance level."""

import math

from geomx_cli.runtime.training.catalog import is_iid
from geomx_cli.runtime.training.evaluation import Score
from geomx_cli.runtime.training.samples import Samples

__all__ = ["divergence_warning"]


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
