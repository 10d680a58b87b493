"""Reads the data sets of the bundled training job (see catalog.py). Needs numpy only.

A user's own data set is a function of a module, named MODULE:FUNCTION: it is called with "train" or "test" and with
--data-dir, and returns images, uint8 or float32 of shape (n, channels, height, width), and labels, integers from 0 of
shape (n,); for a network of TEXT_NETWORKS a text, str or bytes.
"""

import gzip
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.datasets import catalog, sources
from geomx_cli.datasets.catalog import CLASSES, DATA_SETS, Split
from geomx_cli.runtime.data.samples import CHARACTERS, Samples, TextSamples, part_of, split_text
from geomx_cli.runtime.plugin_factory import call

__all__ = [
    "damaged", "load", "load_text", "read_bytes", "read_idx", "read_text", "shape_of", "text_shape", "train_size",
]  # fmt: skip

# IDX files of unsigned bytes, MNIST's format: plain ones are memory-mapped, so that a worker reads only its part.

Bytes = npt.NDArray[np.uint8]
_UNSIGNED_BYTE = 0x08


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Return the array of an IDX file of unsigned bytes: mapped read-only, or decompressed if the name ends in `.gz`.

    Raises InvalidSettings if the file cannot be read, is not an IDX file, or its length does not match its header.
    """
    content = read_bytes(path)
    header = 4 + 4 * dimensions
    if content[:4].tobytes() != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise damaged(path, f"it is no IDX file of unsigned bytes with {dimensions} dimension(s)")
    if len(content) < header:
        raise damaged(path, "its header is cut short")
    shape = [int(extent) for extent in content[4:header].view(">u4")]
    expected = header + math.prod(shape)
    if len(content) != expected:
        what = "cut short" if len(content) < expected else "too long"
        raise damaged(path, f"it is {what}: {len(content)} bytes (unpacked) where its header says {expected}")
    return content[header:].reshape(shape)


def read_bytes(path: Path) -> Bytes:
    """Return a file's bytes, mapped or decompressed. Raises InvalidSettings if it cannot be read."""
    try:
        return np.frombuffer(_unpack(path), np.uint8) if path.suffix == ".gz" else _map(path)
    except (OSError, EOFError, zlib.error) as error:
        raise damaged(path, f"it cannot be read: {error}") from None


def damaged(path: Path, what: str) -> InvalidSettings:
    """Return the error for a damaged data file."""
    return InvalidSettings(f"{path}: {what}", "remove it and run geomx data fetch, or give --data-dir")


def _unpack(path: Path) -> bytes:
    with gzip.open(path) as file:
        return file.read()


def _map(path: Path) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.memmap(path, np.uint8, mode="r")


MOST_CLASSES = 1000  # limit on class numbers in small data sets
LOOKED_AT = 1024
_RECORD = 1 + 3 * 32 * 32


def _read_mnist(paths: list[Path]) -> tuple[Bytes, Bytes]:
    images_path, labels_path = paths
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if images.shape[1:] != (28, 28):
        raise damaged(images_path, f"its images are {images.shape[1]} x {images.shape[2]}, not 28 x 28")
    if len(images) != len(labels):
        raise damaged(labels_path, f"it has {len(labels)} labels for {len(images)} images of {images_path.name}")
    _check_labels(labels_path, labels)
    return images.reshape(-1, 1, 28, 28), labels


def _check_labels(path: Path, labels: Bytes) -> None:
    if not len(labels):
        raise damaged(path, "it is empty")
    if int(labels.max()) >= CLASSES:
        raise damaged(path, f"it has the label {int(labels.max())}; labels are 0 to {CLASSES - 1}")


def _read_cifar10(paths: list[Path]) -> tuple[Bytes, Bytes]:
    """Read records of a label and 3 x 32 x 32 bytes: red, green, blue. There is no header, so the size must match."""
    parts = []
    for path in paths:
        content = read_bytes(path)
        if len(content) % _RECORD:
            raise damaged(path, f"it has {len(content)} bytes (unpacked), no multiple of the {_RECORD} of a record")
        parts.append(content.reshape(-1, _RECORD))
        _check_labels(path, parts[-1][:, 0])
    records = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


_READERS: Mapping[str, Callable[[list[Path]], tuple[Bytes, Bytes]]] = {
    "fashion-mnist": _read_mnist, "mnist": _read_mnist, "cifar10": _read_cifar10,
}  # fmt: skip
"""Reads images and labels from the files of a split."""


def load(name: str, split: Split, data_dir: str | Path = "") -> Samples:
    """Load one split of a data set. Raises InvalidSettings naming the file that is missing, damaged or of another data
    set, or what is wrong with the result of a user's function.
    """
    catalog.check_data(name)
    if catalog.is_own(name):
        return _checked(name, call(name, "--data", split, str(data_dir)))
    if name not in _READERS:
        raise InvalidSettings(f"{name} is a text, and images are needed", "load it with geomx_cli.torch.load_text")
    known, directory = DATA_SETS[name], _directory(name, data_dir)
    other = sources.other_than(name, directory)
    if other:
        hint = f"give --data {other}, or another --data-dir"
        raise InvalidSettings(f"{directory} has {other}, not {name}: their files have the same names", hint)
    return Samples(*_READERS[name](known.paths(directory, split)), CLASSES)


def load_text(name: str, split: Split, context: int, data_dir: str | Path = "") -> TextSamples:
    """Load one split of a text, as windows of `context` characters. Raises as `load`, also for a text too short."""
    if catalog.is_own(name):
        text = part_of(name, call(name, "--data", split, str(data_dir)))
    else:
        text = read_text(name, split, data_dir)
    samples = TextSamples.of(text, context, name=f"--data {name} ({split})")
    return samples if split == "train" else samples.evaluated()


def read_text(name: str, split: Split, data_dir: str | Path = "") -> Bytes:
    """Return one split of a text of DATA_SETS. Raises as `load`, also for a data set of images."""
    catalog.check_data(name)
    if name in _READERS or catalog.is_own(name):
        raise InvalidSettings(f"{name} is no text", "load it with load_data")
    (path,) = DATA_SETS[name].paths(_directory(name, data_dir), split)
    return split_text(read_bytes(path), split)


def text_shape(context: int) -> tuple[tuple[int, int, int], int]:
    """Return the shape of a window, and the number of different characters."""
    return (1, 1, context), CHARACTERS


def train_size(name: str, data_dir: str | Path = "", *, of_text: bool = False) -> int:
    """Return the number of images, or of a text's characters, to train on. Loads no data but a user's own."""
    if name in DATA_SETS:
        return DATA_SETS[name].train_size
    given = call(name, "--data", "train", str(data_dir))
    return len(part_of(name, given) if of_text else _checked(name, given))


def _directory(name: str, data_dir: str | Path) -> Path:
    directory = catalog.find(name, data_dir)
    if directory is None:
        hint = f"geomx data fetch {name} there, or geomx data push {name} from the machine that runs geomx launch"
        raise InvalidSettings(catalog.missing(name, data_dir), hint)
    return directory


def shape_of(name: str, data_dir: str | Path = "") -> tuple[tuple[int, int, int], int]:
    """Return the shape of an image, and the number of classes."""
    if name in DATA_SETS and (shape := DATA_SETS[name].shape) is not None:
        return shape, CLASSES
    test = load(name, "test", data_dir)
    return test.shape, test.classes


def _checked(name: str, given: Any) -> Samples:
    """Validate the return value of a user's function and return it as samples."""
    hint = "return images, uint8 or float32 of shape (n, channels, height, width), and whole labels of shape (n,)"

    def wrong(what: str) -> InvalidSettings:
        return InvalidSettings(f"--data {name}: {what}", hint)

    try:
        images, labels = given
        pictures, numbers = np.asarray(images), np.asarray(labels)
    except (TypeError, ValueError) as error:
        raise wrong(f"it gives no two arrays: {error}") from None
    if pictures.ndim != 4 or pictures.dtype not in (np.uint8, np.float32):
        raise wrong(f"its images are {pictures.dtype} of shape {pictures.shape}")
    if numbers.shape != (len(pictures),) or not np.issubdtype(numbers.dtype, np.integer):
        raise wrong(f"its labels are {numbers.dtype} of shape {numbers.shape} for {len(pictures)} images")
    if not len(numbers) or int(numbers.min()) < 0:
        raise wrong("it has no samples" if not len(numbers) else f"it has the label {int(numbers.min())}")
    if int(numbers.max()) >= max(MOST_CLASSES, len(numbers)):
        raise wrong(f"it has the label {int(numbers.max())} among {len(numbers)} samples")
    if pictures.dtype == np.float32 and not np.isfinite(pictures[:LOOKED_AT]).all():
        raise wrong("its images have values that are no numbers")
    whole: npt.NDArray[np.int64] = numbers.astype(np.int64)
    return Samples(pictures, whole, max(int(whole.max()) + 1, 2))
