"""Checkpoints: weights written to files during training, for evaluation or resuming."""

import io
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.training.last_save import save_at_last

__all__ = ["Checkpoint", "Checkpoints"]

_ABOUT = ("seconds", "samples", "rounds")


@dataclass(frozen=True)
class Checkpoint:
    """A global model, float32 arrays by name, with the steps, samples and rounds of the worker that writes it.

    steps: rounds without data count as a usual round's steps. seconds: since its training began.
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
    thread only. `warn` is called if one cannot be written. Raises InvalidSettings without a folder.
    """

    def __init__(self, folder: str, every: int, warn: Callable[[str], object]) -> None:
        if not folder:
            raise InvalidSettings("there is no folder for the checkpoints", "set GEOMX_OUTPUT_DIR to one")
        self._folder = Path(folder)
        self._every = every
        self._warn = warn
        self._written = 0

    def due(self, steps: int) -> bool:
        """Return whether enough steps have passed since the last checkpoint."""
        return steps - self._written >= self._every

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, replacing an earlier one of this step; on failure only warn."""
        self._written = checkpoint.steps
        try:
            _write(self._folder, checkpoint)
        except OSError as error:
            what = f"no checkpoint of step {checkpoint.steps} in {self._folder}: {error.strerror}"
            self._warn(f"{what}; the next one is due {self._every} steps later")

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
