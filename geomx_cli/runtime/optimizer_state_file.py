"""The optimizer state of a whole model, and its file: numpy's .npz without pickle.

Arrays are named KEY/OFFSET/WHAT: the optimizer's state for the elements of a key from OFFSET on, which were one slice
at the servers. The entry "geomx" is JSON: the optimizer, its hyper-parameters, and the slices of each key.
"""

import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.files import open_atomic
from geomx_cli.ps.arrays import Array

__all__ = ["Cut", "SavedState", "read", "write"]

Cut = tuple[int, int]
"""Elements [offset, offset + length) of a key."""

_FORMAT = 1
_ABOUT = "geomx"


@dataclass(slots=True)
class SavedState:
    """An optimizer's name, hyper-parameters and state.

    dtypes: by key. slices: by key, the arrays of each cut by name, {} before its first update: `step`, int64 of
    shape (1,), and arrays with as many elements as the cut. counts: a worker's own update counts by key, if the
    hyper-parameters are to be restored with the state; else None.
    """

    optimizer: str
    params: dict[str, float | bool]
    dtypes: dict[str, str] = field(default_factory=dict)
    slices: dict[str, dict[Cut, dict[str, Array]]] = field(default_factory=dict)
    counts: dict[int | str, int] | None = None

    def cut(self, key: str, cut: Cut) -> dict[str, Array]:
        """Return the state of one slice, whose boundaries may differ from the saved ones.

        Raises InvalidSettings if the saved slices are inconsistent: saved when only part of the key had been updated.
        """
        slices, (start, length) = self.slices[key], cut
        if cut in slices:
            return slices[cut]
        stop = start + length
        parts = [(at, size, kept) for (at, size), kept in sorted(slices.items()) if at < stop and at + size > start]
        covered = sum(min(stop, at + size) - max(start, at) for at, size, _ in parts)
        if covered != length or len({frozenset(kept) for _, _, kept in parts}) != 1:
            raise InvalidSettings(f"the saved state of key {key!r} does not fit its slices", "it has another size here")
        found = {}
        for what in parts[0][2]:
            pieces = [kept[what][max(start - at, 0) : stop - at] for at, _, kept in parts]
            found[what] = parts[0][2][what] if what == "step" else np.concatenate(pieces)
        return found


def write(path: Path, state: SavedState) -> None:
    """Write a file atomically. Raises InvalidSettings on failure."""
    about = {
        "format": _FORMAT,
        "optimizer": state.optimizer,
        "params": state.params,
        "counts": None if state.counts is None else list(state.counts.items()),
        "keys": {key: {"dtype": state.dtypes[key], "cuts": list(cuts)} for key, cuts in state.slices.items()},
    }
    entries = {_ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for key, cuts in state.slices.items():
        for (offset, _), kept in cuts.items():
            entries |= {f"{key}/{offset}/{what}": array for what, array in kept.items()}
    try:
        with open_atomic(path) as file:
            np.savez(file, **entries)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidSettings(f"cannot write {path}: {error.strerror}", "free space or fix permissions") from None


def read(path: Path) -> SavedState:
    """Read a file. Raises InvalidSettings if it is missing, damaged or of another kind."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return _state(file)
    except OSError as error:
        what = f"cannot read {path}: {error.strerror or error}"
        raise InvalidSettings(what, "see that it is there, on this host") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        message = f"{path} is no whole file of optimizer states: {error}"
        raise InvalidSettings(message, "save_optimizer_states writes one") from None


def _state(file: Any) -> SavedState:
    about = json.loads(file[_ABOUT].tobytes())
    if about["format"] != _FORMAT:
        raise ValueError(f"it has format {about['format']}")
    keys: dict[str, Any] = about["keys"]
    kept: dict[tuple[str, int], dict[str, Array]] = {}
    for name in file.files:
        if name != _ABOUT:
            key, offset, what = name.rsplit("/", 2)
            kept.setdefault((key, int(offset)), {})[what] = file[name]
    slices = {
        key: {(int(at), int(size)): kept.get((key, at), {}) for at, size in item["cuts"]} for key, item in keys.items()
    }
    for cuts in slices.values():
        for (_, size), arrays in cuts.items():
            wrong = [what for what, array in arrays.items() if array.shape != ((1,) if what == "step" else (size,))]
            if wrong:
                raise ValueError(f"{wrong[0]!r} has another shape than its slice")
    counts = about["counts"]
    return SavedState(
        optimizer=str(about["optimizer"]),
        params=dict(about["params"]),
        dtypes={key: str(item["dtype"]) for key, item in keys.items()},
        slices=slices,
        counts=None if counts is None else {key: int(number) for key, number in counts},
    )
