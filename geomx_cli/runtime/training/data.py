"""Fashion-MNIST: where it lies, its IDX files, and the part that one worker trains on. Needs numpy only.

A directory holds a data set when it has all four IDX files, each plain or with `.gz` behind its name. Plain
files are mapped, not read: a worker then touches only its own part.
"""

import gzip
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from geomx_cli.errors import InvalidSettings

__all__ = [
    "FILES",
    "IMAGE_SHAPE",
    "Batch",
    "Samples",
    "Split",
    "directories",
    "find",
    "load",
    "own_directory",
    "read_idx",
]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Batch = tuple[Floats, Floats]
Split = Literal["train", "test"]

FILES: Mapping[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IMAGE_SHAPE = (1, 28, 28)
CLASSES = 10
_UNSIGNED_BYTE = 0x08


@dataclass(frozen=True)
class Samples:
    """Images, uint8 of shape (n, 1, 28, 28), and their labels, uint8 of shape (n,), each below 10."""

    images: Bytes
    labels: Bytes

    def __len__(self) -> int:
        return len(self.labels)

    def shard(self, rank: int, count: int) -> "Samples":
        """A copy of the contiguous part `rank` of `count` equal ones; what does not divide is left out.

        The files are in random order, so that every part has nearly the same mixture of labels. Raises
        InvalidSettings when there are more parts than samples.
        """
        size = len(self) // count
        if size == 0:
            raise InvalidSettings(
                f"{count} workers cannot share {len(self)} samples", "start fewer workers or give more data"
            )
        part = slice(rank * size, (rank + 1) * size)
        return Samples(self.images[part].copy(), self.labels[part].copy())

    def batches(self, size: int, *, seed: int, epoch: int, rank: int) -> Iterator[Batch]:
        """Every sample once, in an order that depends on (seed, epoch, rank) alone.

        Yields new float32 arrays: images of shape (b, 1, 28, 28) scaled to [0, 1], labels of shape (b,); the
        last batch may be short.
        """
        # Unlike Generator's, RandomState's streams never change: hosts with other versions of numpy agree.
        sequence = np.random.SeedSequence([seed, epoch, rank])
        order = np.random.RandomState(np.random.MT19937(sequence)).permutation(len(self))
        for start in range(0, len(order), size):
            yield self.take(order[start : start + size])

    def take(self, which: npt.NDArray[np.int64] | slice) -> Batch:
        """These samples as a batch; see `batches`."""
        images = self.images[which].astype(np.float32)
        images /= 255
        return images, self.labels[which].astype(np.float32)


def load(directory: Path, split: Split) -> Samples:
    """Read one split. Raises InvalidSettings naming the file that is missing, damaged or of other data."""
    names = FILES[split]
    paths = [_path(directory, name) for name in names]
    for name, path in zip(names, paths, strict=True):
        if path is None:
            raise InvalidSettings(f"{directory} has no {name}", "geomx data fetch fashion-mnist fetches the data set")
    images_path, labels_path = (path for path in paths if path is not None)
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != IMAGE_SHAPE[1:]:
        raise _damaged(images_path, f"its images are {images.shape[1]} x {images.shape[2]}, not 28 x 28")
    if len(images) != len(labels):
        raise _damaged(labels_path, f"it has {len(labels)} labels for {len(images)} images of {images_path.name}")
    if not len(labels):
        raise _damaged(labels_path, "it is empty")
    if int(labels.max()) >= CLASSES:
        raise _damaged(labels_path, f"it has the label {int(labels.max())}; labels are 0 to {CLASSES - 1}")
    return Samples(images.reshape(-1, *IMAGE_SHAPE), labels)


def find(name: str, data_dir: str | Path = "") -> Path | None:
    """The first directory that holds the data set, or None. With `data_dir`, only that place is looked at."""
    return next((place for place in directories(name, data_dir) if _complete(place)), None)


def directories(name: str, data_dir: str | Path = "", env: Mapping[str, str] = os.environ) -> list[Path]:
    """Where the data set is looked for: `data_dir`, or else MXNet's, the user's own, Debian's directory."""
    if data_dir:
        given = Path(data_dir).expanduser()
        return [given, given / name]
    mxnet = Path(env["MXNET_HOME"]) if env.get("MXNET_HOME") else Path.home() / ".mxnet"
    return [mxnet / "datasets" / name, own_directory(name, env), Path("/usr/share/datasets") / name]


def own_directory(name: str, env: Mapping[str, str] = os.environ) -> Path:
    """The user's own directory for the data set, as the XDG specification has it; it may not exist yet."""
    base = Path(env.get("XDG_DATA_HOME", ""))
    # The specification has relative paths ignored.
    return (base if base.is_absolute() else Path.home() / ".local" / "share") / "geomx" / name


def read_idx(path: Path, dimensions: int) -> Bytes:
    """The array of an IDX file of unsigned bytes: mapped read-only, or unpacked when the name ends in `.gz`.

    Raises InvalidSettings when the file cannot be read, is no such file, or is longer or shorter than its
    header says.
    """
    try:
        content: Bytes = np.frombuffer(_unpack(path), np.uint8) if path.suffix == ".gz" else _map(path)
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"it cannot be read: {error}") from None
    header = 4 + 4 * dimensions
    if content[:4].tobytes() != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise _damaged(path, f"it is no IDX file of unsigned bytes with {dimensions} dimension(s)")
    if len(content) < header:
        raise _damaged(path, "its header is cut short")
    shape = [int(extent) for extent in content[4:header].view(">u4")]
    expected = header + math.prod(shape)
    if len(content) != expected:
        what = "cut short" if len(content) < expected else "too long"
        raise _damaged(path, f"it is {what}: {len(content)} bytes (unpacked) where its header says {expected}")
    return content[header:].reshape(shape)


def _unpack(path: Path) -> bytes:
    with gzip.open(path) as file:
        return file.read()


def _map(path: Path) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


def _path(directory: Path, name: str) -> Path | None:
    # Plain first: it costs nothing to open.
    candidates = (directory / name, directory / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _complete(directory: Path) -> bool:
    return all(_path(directory, name) for names in FILES.values() for name in names)


def _damaged(path: Path, what: str) -> InvalidSettings:
    return InvalidSettings(f"{path}: {what}", "remove it and run geomx data fetch fashion-mnist, or give --data-dir")
