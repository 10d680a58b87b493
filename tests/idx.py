"""A small synthetic data set in Fashion-MNIST's file format, for tests that train the bundled network."""

from pathlib import Path

import numpy as np


def write_data(folder: Path, train: int = 512, test: int = 64) -> Path:
    """Write images of ten classes that differ in one bright row, so that a network can learn them."""
    folder.mkdir()
    random = np.random.default_rng(7)
    for name, count in (("train", train), ("t10k", test)):
        labels = random.integers(0, 10, count, np.uint8)
        images = random.integers(0, 40, (count, 28, 28), np.uint8)
        images[np.arange(count), 2 * labels + 3] = 250
        sizes = b"".join(size.to_bytes(4, "big") for size in images.shape)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + sizes + images.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + sizes[:4] + labels.tobytes())
    return folder
