"""The text of language_model.py, so many characters of the novels that all workers together take the steps wanted, and
the arguments of its scripts.
"""

import os
import sys
from typing import NamedTuple, Self

from geomx_cli.runtime.data import reader

CHARACTERS = "LANGUAGE_MODEL_CHARACTERS"
"""The variable with the number of characters."""


def text(split: str, folder: str) -> bytes:
    """That many characters to train on, or the end of the novels."""
    whole = reader.read_text("austen", "train" if split == "train" else "test", folder)
    return whole[: int(os.environ[CHARACTERS])].tobytes() if split == "train" else whole.tobytes()


class Arguments(NamedTuple):
    """What a script is to train: sizes of the network, samples in a worker's batch, steps, and the learning rate."""

    layers: int
    width: int
    context: int
    batch: int
    steps: int
    rate: float

    @classmethod
    def given(cls) -> Self:
        """Those of this process."""
        *numbers, rate = sys.argv[1:]
        layers, width, context, batch, steps = map(int, numbers)
        return cls(layers, width, context, batch, steps, float(rate))
