"""Checkpoints: weights written to files during training, for evaluation or resuming."""

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from geomx_cli.core.atomic import open_atomic
from geomx_cli.core.errors import InvalidSettings, TrainingFailed
from geomx_cli.ps.arrays import Floats

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
    """Writes `{job_dir}/checkpoints/step-N.npz` periodically. Files are written atomically.

    Each is a plain npz file: the weights by name and, as scalars, `seconds`, `samples` and `rounds`. For the training
    thread only. Raises InvalidSettings if the process has no job directory.
    """

    def __init__(self, job_dir: str, every: int) -> None:
        if not job_dir:
            raise InvalidSettings("there is no directory for the checkpoints", "set GEOMX_JOB_DIR to one")
        self._directory = Path(job_dir, "checkpoints")
        self._every = every
        self._written = 0

    def due(self, steps: int) -> bool:
        """Return whether enough steps have passed since the last checkpoint."""
        return steps - self._written >= self._every

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, replacing an earlier one of this step. Raises TrainingFailed on failure."""
        self._written = checkpoint.steps
        path = self._directory / f"step-{checkpoint.steps}.npz"
        about = {name: np.array(getattr(checkpoint, name)) for name in _ABOUT}
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with open_atomic(path) as file:
                np.savez(file, **about, **checkpoint.weights)
        except OSError as error:
            hint = "make room there, or leave out --checkpoint-every"
            raise TrainingFailed(f"cannot write {path}: {error.strerror}", hint) from None
