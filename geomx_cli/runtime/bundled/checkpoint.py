"""Checkpoints: weights written to files during training, for evaluation or resuming."""

import hashlib
import io
import json
import os
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save as as_safetensors

from geomx_cli import __version__
from geomx_cli.agent import outputs
from geomx_cli.core.errors import InvalidSettings, TrainingFailed
from geomx_cli.core.files import is_own_folder, open_atomic, write_atomic
from geomx_cli.core.units import format_duration
from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.training.model import ModelAdapter, flat_views

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.optim.optimizer import LocalOptimizer, Optimizer

__all__ = ["Checkpoint", "Checkpoints", "LIMIT", "MANIFEST_VERSION", "Warn", "save", "save_at_last", "save_optimizer"]

# Saving at the end of training, which cannot be repeated later.

LIMIT = 8.0  # seconds of further attempts; a job that is stopped leaves the option `grace` for all of this
_PAUSE = 0.5
_HINT = "make room there, or give the host another state_dir"

Warn = Callable[[str], object]


def save_at_last(folder: Path, write: Callable[[Path], None], warn: Warn, what: str) -> Path:
    """Save with `write(folder)`. If that raises OSError, warn and try again for 8 s, then in a folder on other disks
    (`outputs.fallback_folders`), where `geomx fetch` finds it too. Return the folder that was used, and warn of
    another one.

    `what`: what is saved, for messages, as "the model". Raises TrainingFailed if no disk takes it.
    """
    limit, first = time.monotonic() + LIMIT, ""
    while True:
        try:
            write(folder)
        except OSError as error:
            if not first:
                first = error.strerror or str(error)
                warn(f"cannot save {what} in {folder}: {first}; trying again, for {format_duration(LIMIT)}")
            if time.monotonic() > limit:
                break
            time.sleep(_PAUSE)
        else:
            if first:
                warn(f"{what} could be saved in {folder} now")
            return folder
    for place in outputs.fallback_folders(folder):
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if not is_own_folder(place):  # another account may have made it, as in /tmp
                continue
            write(place)
        except OSError:
            continue
        where = f"{place} of host {os.uname().nodename}, from where geomx fetch brings it"
        warn(f"{what} is in {where}: {folder} cannot be written ({first})")
        return place
    raise TrainingFailed(f"cannot save {what} in {folder}: {first}", _HINT)


# The trained model and the optimizers' state, as files that other programs read.
#
#   worker of global rank 0
#     model.safetensors      the weights, and the statistics of batch normalization, by name
#     optimizer.safetensors  its own optimizer's state as TENSOR/ARRAY, and `step`, if it runs one
#     manifest.json          what they are, and where the roots keep the slices of each tensor; written last
#   each root
#     optimizer.safetensors  its optimizer's state as KEY/SLICE/ARRAY, which does not cross the links between parties

MANIFEST_VERSION = 1
_OPTIMIZER = "optimizer.safetensors"


def save(
    folder: Path, model: ModelAdapter, optimizer: "LocalOptimizer | None", about: Mapping[str, Any], warn: "Warn"
) -> None:
    """Write the model, the state of this worker's own optimizer, which updates the vector of all weights as one slot,
    and the manifest with `about` in it.

    For a disk that is full, and the errors, see save_at_last; then, or if the process is killed before all are written,
    nothing changes.
    """
    weights = model.named_weights() | model.read_statistics()
    contents = {"model.safetensors": _serialized(weights)}
    if optimizer is not None:
        contents[_OPTIMIZER] = _serialized(_by_tensor(optimizer.state, model), optimizer.optimizer)
    manifest = {
        "schema_version": MANIFEST_VERSION,
        "geomx": __version__,
        "saved": time.time(),
        **about,
        "parameters": model.digest(),
        "tensors": {name: {"dtype": str(one.dtype), "shape": list(one.shape)} for name, one in weights.items()},
        "files": {
            name: {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        },
    }
    contents = {"manifest.json": json.dumps(manifest, indent=1).encode(), **contents}
    save_at_last(folder, lambda place: _write_model(place, contents), warn, "the model")


def save_optimizer(folder: Path, optimizer: "Optimizer", state: "Mapping[str, Array]", warn: "Warn") -> None:
    """Write the state of a root's optimizer, as `save` does; before the first update there is none."""
    if state:
        contents = {_OPTIMIZER: _serialized(state, optimizer)}
        save_at_last(folder, lambda place: _write_model(place, contents), warn, "the optimizer's state")


def _write_model(folder: Path, contents: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:  # renames them in reverse order, once all are written
        for name, content in contents.items():
            file = files.enter_context(open_atomic(folder / name))
            file.write(content)
            file.flush()  # a disk may turn out to be full only now
            os.fsync(file.fileno())


def _by_tensor(state: "Mapping[str, Array]", model: ModelAdapter) -> "dict[str, Array]":
    """Return the state of the vector of all weights as TENSOR/ARRAY in the tensors' shapes, and its `step`."""
    named: dict[str, Array] = {}
    for what, array in state.items():
        if what == "step":
            named["step"] = array
            continue
        for parameter, part in zip(model.network.parameters, flat_views(array, model.sizes), strict=True):
            named[f"{parameter.name}/{what}"] = part.reshape(parameter.shape)
    return named


def _serialized(arrays: "Mapping[str, Array]", optimizer: "Optimizer | None" = None) -> bytes:
    about = None
    if optimizer is not None:
        about = {"optimizer": optimizer.name, "hyper_parameters": json.dumps(optimizer.params)}
    return as_safetensors({name: np.ascontiguousarray(array) for name, array in arrays.items()}, about)


_ABOUT = ("seconds", "samples", "rounds")


@dataclass(frozen=True)
class Checkpoint:
    """A global model, float32 arrays by name, with the steps, samples and rounds of the worker that writes it.

    steps: rounds without data count as a usual round's steps.
    seconds: since its training began.
    """

    steps: int
    samples: int
    rounds: int
    seconds: float
    weights: Mapping[str, Floats]

    @classmethod
    def read(cls, path: Path) -> "Checkpoint":
        """Read a file written by `Checkpoints`. Raises InvalidSettings if it is not one."""
        try:
            with np.load(path, allow_pickle=False) as file:
                about = {name: file[name].item() for name in _ABOUT}
                weights = {name: file[name] for name in file.files if name not in _ABOUT}
            return cls(steps=int(path.stem.removeprefix("step-")), weights=weights, **about)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise InvalidSettings(f"{path} is no checkpoint: {error}", "give a step-N.npz of a job") from None


class Checkpoints:
    """Writes `FOLDER/checkpoints/step-N.npz` periodically. Files are written atomically.

    Each is a plain npz file: the weights by name and, as scalars, `seconds`, `samples` and `rounds`. For the training
    thread only. Raises InvalidSettings without a folder.

    every: steps between two.
    warn: called if one cannot be written.
    """

    def __init__(self, folder: str, every: int, warn: Callable[[str], object]) -> None:
        if not folder:
            raise InvalidSettings("there is no folder for the checkpoints", "set GEOMX_OUTPUT_DIR to one")
        self.every = every
        self._folder = Path(folder)
        self._warn = warn

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, replacing an earlier one of this step; on failure only warn."""
        try:
            _write(self._folder, checkpoint)
        except OSError as error:
            what = f"no checkpoint of step {checkpoint.steps} in {self._folder}: {error.strerror}"
            self._warn(f"{what}; the next one is due {self.every} steps later")

    def write_last(self, checkpoint: Checkpoint) -> None:
        """Write the last one; see save_at_last for a disk that is full, and the errors."""
        save_at_last(self._folder, lambda folder: _write(folder, checkpoint), self._warn, "the last checkpoint")


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    about = {name: np.array(getattr(checkpoint, name)) for name in _ABOUT}
    path = folder / "checkpoints" / f"step-{checkpoint.steps}.npz"
    content = io.BytesIO()  # a ZipFile whose file cannot be written prints a traceback when it is collected
    np.savez(content, **about, **checkpoint.weights)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, content.getvalue())
