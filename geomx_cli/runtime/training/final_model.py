"""The trained model and the optimizers' state, as files that other programs read.

The worker of global rank 0 writes
    model.safetensors       the weights, and the statistics of batch normalization, by name
    optimizer.safetensors   its own optimizer's state as TENSOR/ARRAY, and `step`, if it runs one
    manifest.json           what they are, and where the roots keep the slices of each tensor; it is written last
and each root
    optimizer.safetensors   its optimizer's state as KEY/SLICE/ARRAY, which does not cross the links between parties
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save as as_safetensors

from geomx_cli import __version__
from geomx_cli.core.atomic import open_atomic
from geomx_cli.runtime.training.flat_views import flat_views
from geomx_cli.runtime.training.last_save import save_at_last
from geomx_cli.runtime.training.model import ModelAdapter

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.optim.optimizer import Optimizer
    from geomx_cli.runtime.training.last_save import Warn

__all__ = ["MANIFEST_VERSION", "save", "save_optimizer"]

MANIFEST_VERSION = 1
_OPTIMIZER = "optimizer.safetensors"


def save(
    folder: Path, model: ModelAdapter, optimizer: "Optimizer | None", about: Mapping[str, Any], warn: "Warn"
) -> None:
    """Write the model, the state of this worker's own optimizer, which updates the vector of all weights as one slot,
    and the manifest with `about` in it.

    For a disk that is full, and the errors, see save_at_last; then, or if the process is killed before all are written,
    nothing changes.
    """
    weights = model.named_weights() | model.read_statistics()
    contents = {"model.safetensors": _serialized(weights)}
    if optimizer is not None:
        contents[_OPTIMIZER] = _serialized(_by_tensor(optimizer, model), optimizer)
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
    save_at_last(folder, lambda place: _write(place, contents), warn, "the model")


def save_optimizer(folder: Path, optimizer: "Optimizer", warn: "Warn") -> None:
    """Write the state of a root's optimizer, as `save` does; before the first update there is none."""
    if optimizer.updates:
        contents = {_OPTIMIZER: _serialized(optimizer.export_state(), optimizer)}
        save_at_last(folder, lambda place: _write(place, contents), warn, "the optimizer's state")


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as files:  # renames them in reverse order, once all are written
        for name, content in contents.items():
            file = files.enter_context(open_atomic(folder / name))
            file.write(content)
            file.flush()  # a disk may turn out to be full only now
            os.fsync(file.fileno())


def _by_tensor(optimizer: "Optimizer", model: ModelAdapter) -> "dict[str, Array]":
    """Return the state of the vector of all weights as TENSOR/ARRAY in the tensors' shapes, and its `step`."""
    named: dict[str, Array] = {}
    for name, array in optimizer.export_state().items():
        what = name.rpartition("/")[2]
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
