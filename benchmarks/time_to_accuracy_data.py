"""The data of party A of two with --split by-party, as a separate data set, for training on it alone."""

from typing import Any

from geomx_cli.runtime.data import reader


def party_a(split: str, folder: str) -> tuple[Any, Any]:
    """Fashion-MNIST's first five classes for training; all ten for testing."""
    samples = reader.load("fashion-mnist", "train" if split == "train" else "test", folder)
    chosen = slice(None) if split == "test" else samples.labels < 5
    return samples.images[chosen], samples.labels[chosen]
