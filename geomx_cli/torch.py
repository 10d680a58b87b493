"""The API for PyTorch scripts: an optimizer made distributed, this worker's ranks, and its part of the data.

    import geomx_cli.torch as geomx

    geomx.init()
    dataset = geomx.shard(dataset)
    optimizer = geomx.wrap(model, optimizer)

Loops of frameworks take one line: geomx.hf.Callback() of HF's Trainer, geomx.lightning.Strategy() of Lightning's.

Scripts run under `geomx launch` or `python -m geomx_cli.runtime`, with one job per process. All functions but `report`
must be called from the training thread. After a failure of the job, calls of these functions, of `backward` and `step`
and, with --p3, the first use of a tensor that is still on its way raise GeomxError, whose `hint` says what to do.
"""

import importlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if __name__ == "torch":  # geomx's own folder precedes the real torch on sys.path
    raise ImportError(f"{__file__} is not PyTorch: take its folder off sys.path and PYTHONPATH")

from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.runtime import finder, script
from geomx_cli.runtime.frontends.torch import load
from geomx_cli.runtime.frontends.torch.contexts import DiLoCo, LocalSGD, Training
from geomx_cli.runtime.reports import report

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.data import ShardSampler, TensorDataset
    from geomx_cli.runtime.frontends.torch.trainers import hf as hf  # noqa: PLC0414  # see __getattr__
    from geomx_cli.runtime.frontends.torch.trainers import lightning as lightning  # noqa: PLC0414
    from geomx_cli.runtime.frontends.torch.wrapping_store import WrappingStore

__all__ = [
    "DiLoCo", "GeomxError", "InvalidSettings", "LocalSGD", "Training", "finish", "global_rank", "init", "is_master",
    "load_data", "load_text", "no_sync", "num_all_workers", "report", "sampler", "shard", "wrap",
]  # fmt: skip

_Optimizer = TypeVar("_Optimizer")  # or a list or tuple of some
_TRAINERS = {"hf": "pip install transformers accelerate", "lightning": "pip install lightning"}


def __getattr__(name: str) -> Any:
    """The modules `hf` and `lightning`, which import these frameworks. Raises InvalidSettings where that fails."""
    if name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"geomx_cli.runtime.frontends.torch.trainers.{name}")
    except ImportError as error:
        raise InvalidSettings(f"geomx.{name}: {error}", _TRAINERS[name]) from error


def init() -> None:
    """Join the job and block until all of its processes have; later calls do nothing.

    Ends the process, with status 0, in a master worker that does not train. With `--shards` it makes the default group
    of torch.distributed, of the party's workers. Raises InvalidSettings in a process not started by geomx, and
    GeomxError if the job has failed.
    """
    if script.session().store is not None:
        return
    load.check_process("geomx_cli.torch.init")
    if not finder.has_run():  # else a failure of the script would not be reported
        hint = f"geomx launch -- python {sys.argv[0]}, or python -m geomx_cli.runtime {sys.argv[0]}"
        raise InvalidSettings("this script was not started by geomx", hint)
    load.new_store(script.session())


def wrap(model: Any, optimizer: _Optimizer, *, buffers: str = "local") -> _Optimizer:
    """Make `optimizer` train `model` (torch.nn.Module) together with all other workers, and return it; blocks until
    all have called this, with equal models and optimizers.

    All workers get the parameters and buffers of the master worker. What is exchanged is chosen with `geomx launch
    --algo`: with fsa and sync, `backward` leaves the mean of all workers' gradients. The optimizer stays the script's
    own: schedulers, clipping, GradScaler, parameter groups and state_dict work as before. Parameters with
    requires_grad=False stay as they are. Several optimizers of one model may be given as a list or tuple, which is
    returned; those of several models are wrapped one by one. With `--shards`
    fully_shard has divided the model over the party's workers before, and the optimizer is one of its DTensors.

    buffers: "local": each worker's own, as running statistics of batch normalization, until all get those of one worker
    in `finish`; "mean": the means over all workers, with each round (fsa, sync, hfa).

    Raises InvalidSettings, naming the tensor, for models that differ or cannot be exchanged.
    """
    _store().wrap(model, optimizer, buffers)
    return optimizer


def no_sync() -> AbstractContextManager[None]:
    """A context in which backward passes accumulate gradients without exchanging them, as DistributedDataParallel's.
    The next pass outside of it exchanges the accumulated ones.
    """
    return _store().no_sync()


def finish() -> None:
    """End training: contribute what is left, wait for the other workers, and leave the same tensors in all models.

    A script that ends successfully does this by itself; call it before evaluating or saving the model. Workers may
    make different numbers of steps: one that has finished no longer counts in means. Afterwards the wrapped optimizers
    cannot step. Blocks; raises GeomxError if the job fails.
    """
    _store().finish()


def load_data(name: str, split: Literal["train", "test"], data_dir: str | Path = "") -> "TensorDataset":
    """Load a data set of `geomx data fetch`: images, float32 of shape (channels, height, width) from 0 to 1, and int64
    labels.

    data_dir: its directory, if not in the default locations. Raises InvalidSettings if it is not on this host.
    """
    from geomx_cli.runtime.frontends.torch import data

    return data.load(name, split, data_dir)


def load_text(name: str, split: Literal["train", "test"], data_dir: str | Path = "") -> Any:
    """Load a text of `geomx data fetch`: its bytes, as torch.Tensor, uint8 of shape (n,).

    split: all but the last twentieth of it, or that. data_dir: its directory, if not in the default locations.
    Raises InvalidSettings if it is not on this host.
    """
    from geomx_cli.runtime.frontends.torch import data

    return data.load_text(name, split, data_dir)


def shard(dataset: Any, split: str = "iid", seed: int = 1) -> Any:
    """Return this worker's part of a map-style data set, as torch.utils.data.Subset. All workers must pass the same
    arguments; parts are equally large, but for dirichlet.

    split: as --split of `geomx launch`: iid, by-class, by-party or dirichlet:ALPHA, drawn with `seed`; all but iid need
    labels: dataset.targets, dataset.labels or the last tensor of a TensorDataset. Raises InvalidSettings for a data set
    without indices or labels, and if there are fewer samples than workers.
    """
    from geomx_cli.runtime.frontends.torch import data

    store = _store()
    return data.shard(dataset, store.global_rank, store.num_all_workers, split, seed, store.party_ranks)


def sampler(dataset: Any, *, shuffle: bool = True, seed: int = 1) -> "ShardSampler":
    """Return a sampler for DataLoader(dataset, sampler=...): in each epoch another part of the data set for each
    worker. The next epoch begins with the first iteration after a step of an optimizer, so a worker may look at a batch
    or evaluate with it; see docs/pytorch.md for an exception. All workers must pass the same arguments. Raises
    InvalidSettings as `shard`.
    """
    from geomx_cli.runtime.frontends.torch import data

    return data.ShardSampler(dataset, _store().global_rank, _store().num_all_workers, shuffle=shuffle, seed=seed)


def global_rank() -> int:
    """Rank among the training workers of all parties, from 0.

    This and the functions below raise InvalidSettings before `init`.
    """
    return _store().global_rank


def num_all_workers() -> int:
    """Number of training workers in all parties."""
    return _store().num_all_workers


def is_master() -> bool:
    """Whether this is the worker of global rank 0, which is to save models."""
    return _store().global_rank == 0


def _store() -> "WrappingStore":
    return load.joined(script.session())
