"""What a bundled job goes on from that has other numbers of parties, workers, servers or epochs than the job before.

`geomx launch --resume` collects it from what that job has saved, and puts it into START_FOLDER of the new job's
directory on each host. Workers read it there.

    job.json               Left, below
    model.safetensors      the weights, and the statistics of batch normalisation, by name
    optimizer.safetensors  the state of the first worker's own optimizer as TENSOR/ARRAY, and `step`; if it ran ours
    root-N.safetensors     the state of the optimizer on root N as KEY/SLICE/ARRAY; if it ran one
"""

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from geomx_cli.core.events import MAX_COUNT, Count, Seconds

__all__ = [
    "ABOUT", "Drawn", "Left", "MODEL", "MOST_EPOCHS", "Manifest", "OPTIMIZER", "Optimizer",
    "Placement", "decode", "root_file",
]  # fmt: skip

ABOUT, MODEL, OPTIMIZER = "job.json", "model.safetensors", "optimizer.safetensors"
MOST_EPOCHS = 100
"""Epochs of which workers of one job may have drawn a part. They differ if parties train asynchronously."""

_Kind = TypeVar("_Kind")


class Optimizer(msgspec.Struct):
    """An optimizer by name."""

    name: str
    hyper_parameters: dict[str, float | bool]


class Optimizers(msgspec.Struct, rename={"server": "global"}):
    """The optimizer on the roots, and that of each worker; None for none."""

    server: Optimizer | None
    worker: Optimizer | None


class Piece(msgspec.Struct):
    """A slice: elements of its tensor, and the rank of the root that owns it."""

    offset: Count
    length: Count
    root: Count


class Placement(msgspec.Struct):
    """A tensor's number, and its slices."""

    key: Count
    slices: list[Piece]


class Tensor(msgspec.Struct):
    """What a tensor is."""

    dtype: str


class SavedFile(msgspec.Struct):
    """A file as it was saved."""

    sha256: str


class Manifest(msgspec.Struct):
    """The fields of manifest.json, which stands beside a saved model (runtime/bundled/checkpoint.py), that are needed.

    step, rounds, seconds: as the first worker has counted them, with those of the jobs before.
    """

    step: Count
    rounds: Count
    seconds: Seconds
    optimizers: Optimizers
    slices: dict[str, Placement]
    tensors: dict[str, Tensor]
    files: dict[str, SavedFile]


class Drawn(msgspec.Struct):
    """What the workers of a job had drawn of the data when it ended.

    places: by global rank, the epoch of the worker's next batch, and how many batches it had drawn of that epoch.
    parties: by global rank, the first rank of the worker's party, and the one after its last; empty in a flat cluster.
    split, seed, batch_size: the options.
    """

    places: Annotated[list[tuple[Count, Count]], Meta(min_length=1)]
    parties: list[tuple[Count, Count]]
    split: str
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)]
    batch_size: Annotated[int, Meta(ge=1, lt=MAX_COUNT)]

    def __post_init__(self) -> None:
        if len(self.parties) not in (0, len(self.places)):
            raise ValueError(f"{len(self.parties)} parties of {len(self.places)} workers")

    @property
    def first(self) -> int:
        """The first epoch of which a worker has something left."""
        return min(epoch for epoch, _ in self.places)

    @property
    def last(self) -> int:
        """The last epoch of which a worker has drawn something; -1 for none."""
        return max(epoch if batches else epoch - 1 for epoch, batches in self.places)


class Left(msgspec.Struct):
    """job.json.

    drawn: by the jobs so far, the earliest first.
    samples: on which the workers of all these jobs have trained.
    """

    manifest: Manifest
    drawn: Annotated[list[Drawn], Meta(min_length=1)]
    samples: Count


def decode(content: bytes, kind: type[_Kind]) -> _Kind:
    """Decode one of these. Raises ValueError with what is wrong."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None


def root_file(rank: int) -> str:
    """The name of the file of a root."""
    return f"root-{rank}.safetensors"
