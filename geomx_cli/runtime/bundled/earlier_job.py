"""What a bundled job goes on from that has other numbers of parties, workers or servers than the job before: the model
that this saved when it ended, the optimizers' state by tensor, and what it had drawn of the data.

`geomx launch --resume` puts the files into one folder of each host (jobs/store/saved_job.py):

    job.json                  of the manifests below; which batches the jobs so far have drawn; their samples
    model.safetensors         the weights and statistics, by name
    optimizer.safetensors     the state of the first worker's own optimizer, if it ran ours
    root-N.safetensors        the state of the optimizer on root N, if it ran one
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.data.epochs import Drawn
from geomx_cli.runtime.script.optimizer_state import SavedState

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.optim.optimizer import LocalOptimizer
    from geomx_cli.runtime.training.model import ModelAdapter

__all__ = ["EarlierJob"]

_STEP = "step"


@dataclass(frozen=True)
class EarlierJob:
    """The files of one folder. For the training thread.

    drawn: what this job and those before it have drawn, the earliest first.
    samples: on which its workers have trained, with those of the jobs before it.
    steps, rounds, seconds: as its first worker counted them, with those of the jobs before it.
    """

    folder: Path
    manifest: dict[str, Any]
    drawn: tuple[Drawn, ...]
    samples: int
    steps: int
    rounds: int
    seconds: float

    @classmethod
    def read(cls, folder: str) -> "EarlierJob | None":
        """Read a folder; None without one. Raises InvalidSettings if job.json cannot be read."""
        if not folder:
            return None
        path = Path(folder, "job.json")
        try:
            fields = json.loads(path.read_bytes())
            manifest = dict(fields["manifest"])
            drawn = tuple(map(Drawn.of, fields["drawn"]))
            counts = (int(fields["samples"]), int(manifest["step"]), int(manifest["rounds"]))
            if not drawn or min(counts) < 0:
                raise ValueError("numbers that cannot be")
            return cls(Path(folder), manifest, drawn, *counts, float(manifest["seconds"]))
        except (OSError, KeyError, TypeError, ValueError) as error:
            hint = "launch the job again: --resume copies the file to each host"
            raise InvalidSettings(f"{path} cannot be read: {error}", hint) from None

    def weights(self) -> "dict[str, Array]":
        """Return the weights and statistics by name."""
        return self._load("model.safetensors")

    def server_state(self) -> SavedState | None:
        """Return the state of the roots' optimizer; None if they ran none, or had not updated anything."""
        outer = self.manifest["optimizers"]["global"]
        found: dict[str, Array] = {}
        for path in sorted(self.folder.glob("root-*.safetensors")):
            found |= self._load(path.name)
        if outer is None or not found:
            return None
        state = SavedState(str(outer["name"]), dict(outer["hyper_parameters"]))
        for name, placement in self.manifest["slices"].items():
            state.dtypes[name], state.slices[name] = str(self.manifest["tensors"][name]["dtype"]), {}
            for index, piece in enumerate(placement["slices"]):
                start = f"{placement['key']}/{index}/"
                arrays = {key.removeprefix(start): array for key, array in found.items() if key.startswith(start)}
                # An array of a single member, as of delayed gradients, means nothing to other members.
                kept = {what: array for what, array in arrays.items() if "." not in what}
                state.slices[name][int(piece["offset"]), int(piece["length"])] = kept
        return state

    def load_optimizer(self, optimizer: "LocalOptimizer", model: "ModelAdapter") -> None:
        """Give a worker's own optimizer the state of the first worker's, if it is of the same kind."""
        own = self.manifest["optimizers"]["worker"]
        if own is None or own["name"] != optimizer.optimizer.name:
            return
        named = self._load("optimizer.safetensors")
        kinds = {name.rpartition("/")[2] for name in named if name != _STEP}
        optimizer.state = {
            kind: np.concatenate([named[f"{one.name}/{kind}"].reshape(-1) for one in model.network.parameters])
            for kind in kinds
        }
        if _STEP in named:
            optimizer.state[_STEP] = named[_STEP].copy()

    def share_of_samples(self, rank: int, workers: int) -> int:
        """Return the part of `samples` that counts for one of the workers, so that their sum is the same."""
        return self.samples // workers + (rank < self.samples % workers)

    def _load(self, name: str) -> "dict[str, Array]":
        try:
            return load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            hint = "launch the job again: --resume copies the file to each host"
            raise InvalidSettings(f"{self.folder / name} cannot be read: {error}", hint) from None
