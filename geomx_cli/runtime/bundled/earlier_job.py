"""The job from whose model a bundled job with other numbers of workers goes on: see contract/earlier_job.py."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from geomx_cli.contract.earlier_job import ABOUT, MODEL, OPTIMIZER, Left, Manifest, decode, root_file
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.data.epochs import Drawn
from geomx_cli.runtime.script.optimizer_state import SavedState

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.optim.optimizer import LocalOptimizer
    from geomx_cli.runtime.training.model import ModelAdapter

__all__ = ["EarlierJob"]

_STEP, _INITIAL = "step", "initial"


@dataclass(frozen=True)
class EarlierJob:
    """What it has left, in one folder. For the training thread. Methods raise InvalidSettings for unreadable files.

    drawn: what this job and those before it have drawn, the earliest first.
    samples: on which its workers have trained, with those of the jobs before it.
    """

    folder: Path
    manifest: Manifest
    drawn: tuple[Drawn, ...]
    samples: int

    @classmethod
    def read(cls, folder: str) -> "EarlierJob | None":
        """Read a folder; None without one. Raises InvalidSettings if job.json cannot be read."""
        if not folder:
            return None
        path = Path(folder, ABOUT)
        try:
            left = decode(path.read_bytes(), Left)
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from None
        return cls(path.parent, left.manifest, tuple(map(Drawn.of, left.drawn)), left.samples)

    @cached_property
    def weights(self) -> "dict[str, Array]":
        """The weights and statistics by name."""
        return self._load(MODEL)

    @cached_property
    def server_state(self) -> SavedState | None:
        """The state of the roots' optimizer; None if they ran none, or had not updated anything."""
        outer = self.manifest.optimizers.server
        ranks = {piece.root for placement in self.manifest.slices.values() for piece in placement.slices}
        found: dict[str, Array] = {}
        for name in map(root_file, sorted(ranks)):
            found |= self._load(name) if (self.folder / name).exists() else {}
        if outer is None or not found:
            return None
        by_slice: dict[str, dict[str, Array]] = {}
        for name, array in found.items():
            start, _, what = name.rpartition("/")
            if "." not in what:  # an array of a single member, as of delayed gradients, means nothing to other members
                by_slice.setdefault(start, {})[what] = array
        state = SavedState(outer.name, dict(outer.hyper_parameters))
        for name, placement in self.manifest.slices.items():
            state.dtypes[name], state.slices[name] = self.manifest.tensors[name].dtype, {}
            for index, piece in enumerate(placement.slices):
                kept = by_slice.get(f"{placement.key}/{index}", {})
                if _INITIAL in kept:  # the weights with which this job begins
                    kept[_INITIAL] = self.weights[name].reshape(-1)[piece.offset : piece.offset + piece.length]
                state.slices[name][piece.offset, piece.length] = kept
        return state

    @property
    def updates(self) -> int:
        """Updates of the roots' optimizer; 0 without one."""
        slices = self.server_state.slices if self.server_state is not None else {}
        kept = [arrays for cuts in slices.values() for arrays in cuts.values()]
        return max((int(arrays[_STEP][0]) for arrays in kept if _STEP in arrays), default=0)

    def load_optimizer(self, optimizer: "LocalOptimizer", model: "ModelAdapter") -> None:
        """Give a worker's own optimizer the state of the first worker's, if it is of the same kind."""
        own = self.manifest.optimizers.worker
        if own is None or own.name != optimizer.optimizer.name:
            return
        named = self._load(OPTIMIZER)
        kinds = {name.rpartition("/")[2] for name in named if name != _STEP}
        try:
            optimizer.state = {
                kind: np.concatenate([named[f"{one.name}/{kind}"].reshape(-1) for one in model.network.parameters])
                for kind in kinds
            }
        except KeyError as error:
            raise _unreadable(self.folder / OPTIMIZER, f"it lacks {error}") from None
        if _STEP in named:
            optimizer.state[_STEP] = named[_STEP].copy()

    def share_of_samples(self, rank: int, workers: int) -> int:
        """Return the part of `samples` that counts for one of the workers, so that their sum is the same."""
        return self.samples // workers + (rank < self.samples % workers)

    def _load(self, name: str) -> "dict[str, Array]":
        try:
            return load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.folder / name, error) from None


def _unreadable(path: Path, why: object) -> InvalidSettings:
    return InvalidSettings(f"{path} cannot be read: {why}", "launch again: --resume copies the file to each host")
