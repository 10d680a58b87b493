"""Names known to the bundled training job besides networks: data sets and their locations, data splits.

For planning and checks; loads nothing, not even numpy. A directory contains a data set if it has all its files, each
plain or with the suffix `.gz`. A user's own network or data set is named MODULE:FUNCTION.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from platformdirs import user_data_path

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.option import nearest

__all__ = [
    "BY_CLASS", "BY_PARTY", "CLASSES", "DATA_SETS", "DIRICHLET", "IID", "TEXT_NETWORKS", "DataSet", "Split",
    "check_data", "check_fit", "check_split", "directories", "find", "is_iid", "is_own", "missing", "own_directory",
]  # fmt: skip

Split = Literal["train", "test"]
CLASSES = 10
"""Number of classes of every data set of images here."""
IID, BY_CLASS, BY_PARTY, DIRICHLET = "iid", "by-class", "by-party", "dirichlet"
TEXT_NETWORKS = ("gpt",)
"""Networks that train on texts; all others train on images."""
LEAST_ALPHA = 0.01  # below it numpy's gamma variates are occasionally zero
_OWN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def is_own(name: str) -> bool:
    """Return whether `name` has the form of a user's own network or data set."""
    return _OWN.fullmatch(name) is not None


@dataclass(frozen=True)
class DataSet:
    """A data set of files.

    shape: of an image: channels, height, width; None for a text.
    files: file names by split; of a text, one file for both.
    train_size: images, or characters, to train on.
    """

    shape: tuple[int, int, int] | None
    files: Mapping[Split, tuple[str, ...]]
    train_size: int

    def complete(self, directory: Path) -> bool:
        """Return whether all files are in the directory."""
        return all(_path(directory, name) for names in self.files.values() for name in names)

    def paths(self, directory: Path, split: Split) -> list[Path]:
        """Return the existing files of a split."""
        return [path for name in self.files[split] if (path := _path(directory, name)) is not None]


_MNIST: Mapping[Split, tuple[str, ...]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
DATA_SETS: Mapping[str, DataSet] = {
    "fashion-mnist": DataSet((1, 28, 28), _MNIST, 60_000),
    "mnist": DataSet((1, 28, 28), _MNIST, 60_000),
    "cifar10": DataSet(
        (3, 32, 32),
        {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
        50_000,
    ),
    "austen": DataSet(None, {"train": ("austen.txt",), "test": ("austen.txt",)}, 3_823_778),
}
"""Data sets by name."""


def check_data(name: str) -> None:
    """Raises InvalidSettings for an unknown data set; a user's own is checked only when used."""
    if name not in DATA_SETS and not is_own(name):
        hint = f"{nearest(name, DATA_SETS)} (one of your own: MODULE:FUNCTION)"
        raise InvalidSettings(f"--data {name}: there is no such data set", hint)


def check_fit(data: str, network: str, split: str) -> None:
    """Raises InvalidSettings if the network cannot train on the data set: gpt on images, others on a text; and if a
    text is to be divided by classes, of which it has none. A user's own is checked only when used.
    """
    known = DATA_SETS.get(data)
    if network in TEXT_NETWORKS:
        if known is not None and known.shape is not None:
            raise InvalidSettings(f"--network {network} trains on a text, and {data} has images", "give --data austen")
        if not is_iid(split):
            what = f"--split {split}: a text has no classes"
            raise InvalidSettings(what, f"write --split {IID}: each worker has a contiguous part")
    elif known is not None and known.shape is None:
        hint = f"give --network {' or '.join(TEXT_NETWORKS)}, or data with images"
        raise InvalidSettings(f"--network {network} trains on images, and {data} is a text", hint)


def find(name: str, data_dir: str | Path = "") -> Path | None:
    """Return the first directory that contains the data set, or None. With `data_dir`, only that one is searched."""
    return next((place for place in directories(name, data_dir) if DATA_SETS[name].complete(place)), None)


def directories(name: str, data_dir: str | Path = "") -> list[Path]:
    """Return the search path of the data set: `data_dir`, or else MXNet's, the user's own, Debian's directory."""
    if data_dir:
        given = Path(data_dir).expanduser()
        return [given, given / name]
    mxnet = Path(os.environ.get("MXNET_HOME") or "~/.mxnet").expanduser()
    return [mxnet / "datasets" / name, own_directory(name), Path("/usr/share/datasets") / name]


def own_directory(name: str) -> Path:
    """Return the user's own directory for the data set, per the XDG specification; it may not exist yet."""
    return user_data_path("geomx") / name


def missing(name: str, data_dir: str | Path) -> str:
    """Explain why the data set is not found: the missing files if part of it exists, else the search path."""
    places = directories(name, data_dir)
    files = list(dict.fromkeys(file for half in DATA_SETS[name].files.values() for file in half))
    for place in places:
        lacking = [file for file in files if _path(place, file) is None]
        if len(lacking) < len(files):
            return f"{place} has no {', '.join(lacking)}"
    return f"{name} is in none of {', '.join(str(place) for place in places)}"


def _path(directory: Path, name: str) -> Path | None:
    # Plain first: it needs no decompression.
    candidates = (directory / name, directory / f"{name}.gz")
    return next((path for path in candidates if path.is_file()), None)


def is_iid(split: str) -> bool:
    """Return whether every worker gets nearly the same mixture of classes."""
    return split == IID


def check_split(split: str, *, flat: bool = False) -> float:
    """Return the ALPHA of dirichlet:ALPHA, inf for the others. Raises InvalidSettings for an invalid value of --split,
    or one not possible in a flat cluster.
    """
    if split == BY_PARTY and flat:
        hint = f"give an algorithm with another topology, or --split {BY_CLASS}"
        raise InvalidSettings(f"--split {BY_PARTY}: --topology flat has no parties", hint)
    kind, _, alpha = split.partition(":")
    if split in (IID, BY_CLASS, BY_PARTY):
        return math.inf
    try:
        number = float(alpha) if kind == DIRICHLET else 0.0
    except ValueError:
        number = 0.0
    if not LEAST_ALPHA <= number <= 1e6:
        known = f"{IID}, {BY_CLASS}, {BY_PARTY}"
        hint = f"write {known}, or {DIRICHLET}:0.3 with a number from {LEAST_ALPHA}; the smaller, the more uneven"
        raise InvalidSettings(f"--split {split}: there is no such way to divide the data", hint)
    return number
