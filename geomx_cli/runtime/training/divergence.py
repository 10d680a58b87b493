"""Whether training gets anywhere: a learning rate that does not fit shows in the loss, or in an accuracy of chance."""

import math

from geomx_cli.runtime.training.catalog import is_iid
from geomx_cli.runtime.training.samples import Samples

__all__ = ["divergence_warning"]


def divergence_warning(loss: float, accuracy: float, test: Samples, rate: float, split: str) -> str:
    """What is wrong, and what to change, after an evaluation on the samples `test`; "" when all is well.

    loss: the mean of a round, of one worker. rate: the learning rate. split: how the data are divided. What guessing
    reaches in 999 of 1000 tries is chance.
    """
    chance = 1 / test.classes + 3 * math.sqrt((test.classes - 1) / len(test)) / test.classes
    if math.isfinite(loss) and accuracy > chance:
        return ""
    what = f"the loss is {loss}" if not math.isfinite(loss) else f"test accuracy {accuracy:.4f} is what guessing gives"
    divided = "" if is_iid(split) else f"; and the data are divided {split} (--split), which is hard"
    return f"{what}: does the learning rate fit the optimizer? It is {rate:g} (--lr){divided}"
