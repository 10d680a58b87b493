"""The data sets of the bundled training job: which there are, where they lie, and how they are read. Needs numpy only.

A directory holds a data set when it has all its files, each plain or with `.gz` behind its name. A person's own data
set is a function of a module, named MODULE:FUNCTION: it is called with "train" or "test" and with --data-dir, and
returns images, uint8 or float32 of shape (n, channels, height, width), and labels, whole numbers from 0 of shape (n,).
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from geomx_cli.errors import InvalidSettings
from geomx_cli.runtime.training import sources
from geomx_cli.runtime.training.idx import Bytes, damaged, read_bytes, read_idx
from geomx_cli.runtime.training.own import call, is_own
from geomx_cli.runtime.training.samples import Samples

__all__ = ["DATA_SETS", "DataSet", "Split", "check_name", "directories", "find", "load", "own_directory", "shape_of"]

Split = Literal["train", "test"]
CLASSES = 10
MOST_CLASSES = 1000  # that may have no samples here
LOOKED_AT = 1024
_RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class DataSet:
    """A data set of files. `files`: the names of each half's; `read` makes images and labels of their paths."""

    shape: tuple[int, int, int]
    files: Mapping[Split, tuple[str, ...]]
    read: Callable[[list[Path]], tuple[Bytes, Bytes]]

    def complete(self, directory: Path) -> bool:
        """Whether all files are there."""
        return all(_path(directory, name) for names in self.files.values() for name in names)


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
    """Records of a label and 3 x 32 x 32 bytes: red, green, blue. There is no header, so the size must fit."""
    parts = []
    for path in paths:
        content = read_bytes(path)
        if len(content) % _RECORD:
            raise damaged(path, f"it has {len(content)} bytes (unpacked), no multiple of the {_RECORD} of a record")
        parts.append(content.reshape(-1, _RECORD))
        _check_labels(path, parts[-1][:, 0])
    records = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


_MNIST: Mapping[Split, tuple[str, ...]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
DATA_SETS: Mapping[str, DataSet] = {
    "fashion-mnist": DataSet((1, 28, 28), _MNIST, _read_mnist),
    "mnist": DataSet((1, 28, 28), _MNIST, _read_mnist),
    "cifar10": DataSet(
        (3, 32, 32),
        {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
        _read_cifar10,
    ),
}
"""By name; all have ten classes."""


def check_name(name: str) -> None:
    """Raises InvalidSettings for a data set that there is not; whether somebody's own works is seen when it is used."""
    if name not in DATA_SETS and not is_own(name):
        hint = f"choose one of {', '.join(DATA_SETS)}, or write MODULE:FUNCTION for one of your own"
        raise InvalidSettings(f"--data {name}: there is no such data set", hint)


def load(name: str, split: Split, data_dir: str | Path = "") -> Samples:
    """One half of a data set. Raises InvalidSettings where it is not here, naming the file that is missing, damaged or
    of other data, or what a function of one's own gives that is none.
    """
    check_name(name)
    if is_own(name):
        return _checked(name, call(name, "--data", split, str(data_dir)))
    directory, known = find(name, data_dir), DATA_SETS[name]
    if directory is None:
        raise InvalidSettings(_where(name, data_dir), f"geomx data fetch {name} fetches it")
    other = sources.other_than(name, directory)
    if other:
        hint = f"give --data {other}, or another --data-dir"
        raise InvalidSettings(f"{directory} has {other}, not {name}: their files have the same names", hint)
    paths = [path for file in known.files[split] if (path := _path(directory, file)) is not None]
    return Samples(*known.read(paths), CLASSES)


def shape_of(name: str, data_dir: str | Path = "") -> tuple[tuple[int, int, int], int]:
    """The shape of an image, and the number of classes."""
    if name in DATA_SETS:
        return DATA_SETS[name].shape, CLASSES
    test = load(name, "test", data_dir)
    return test.shape, test.classes


def find(name: str, data_dir: str | Path = "") -> Path | None:
    """The first directory that holds the data set, or None. With `data_dir`, only that place is looked at."""
    return next((place for place in directories(name, data_dir) if DATA_SETS[name].complete(place)), None)


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


def _where(name: str, data_dir: str | Path) -> str:
    """Why the data set is not found: what is missing where a part of it lies, or else where it was looked for."""
    places = directories(name, data_dir)
    files = [file for half in DATA_SETS[name].files.values() for file in half]
    for place in places:
        missing = [file for file in files if _path(place, file) is None]
        if len(missing) < len(files):
            return f"{place} has no {', '.join(missing)}"
    return f"{name} is in none of {', '.join(str(place) for place in places)}"


def _path(directory: Path, name: str) -> Path | None:
    # Plain first: it costs nothing to open.
    candidates = (directory / name, directory / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def _checked(name: str, given: Any) -> Samples:
    """What a function of one's own has returned, as samples."""
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
