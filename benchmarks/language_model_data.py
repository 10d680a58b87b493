"""The text of language_model.py: so many characters of the novels that all workers together take the steps wanted."""

import os

from geomx_cli.runtime.training import data

CHARACTERS = "LANGUAGE_MODEL_CHARACTERS"
"""The variable with the number of characters."""


def text(split: str, folder: str) -> bytes:
    """That many characters to train on, or the end of the novels."""
    whole = data.read_text("austen", "train" if split == "train" else "test", folder)
    return whole[: int(os.environ[CHARACTERS])].tobytes() if split == "train" else whole.tobytes()
