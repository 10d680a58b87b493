"""The API for PyTorch scripts: an optimizer made distributed, this worker's ranks, and its part of the data.

    import geomx_cli.torch as geomx

    geomx.init()
    dataset = geomx.shard(dataset)
    optimizer = geomx.wrap(model, optimizer)

Loops of frameworks take one line: geomx.hf.Callback() of HF's Trainer, geomx.lightning.Strategy() of Lightning's.

Scripts run under `geomx launch` or `python -m geomx_cli.runtime`, with one job per process. All functions but `report`
must be called from the training thread. After a failure of the job these functions, `backward` and `step` raise
GeomxError, whose `hint` says what to do. With --p3 the first use of a tensor that is still on its way raises it too.
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
    """Join the job, and block until all of its processes have joined. Later calls have no effect.

    In a master worker that does not train it ends the process, with status 0. With `--shards` it makes the default
    group of torch.distributed, of the party's workers.

    Raises:
        InvalidSettings: The process was not started by geomx.
        GeomxError: The job has failed.

    Examples:
        >>> import geomx_cli.torch as geomx
        >>> geomx.init()
    """
    if script.session().store is not None:
        return
    load.check_process("geomx_cli.torch.init")
    if not finder.has_run():  # else a failure of the script would not be reported
        hint = f"geomx launch -- python {sys.argv[0]}, or python -m geomx_cli.runtime {sys.argv[0]}"
        raise InvalidSettings("this script was not started by geomx", hint)
    load.new_store(script.session())


def wrap(model: Any, optimizer: _Optimizer, *, buffers: str = "local") -> _Optimizer:
    """Make `optimizer` train `model` together with all other workers. Blocks until all have called it.

    All workers get the parameters and buffers of the master worker. `geomx launch --algo` chooses what is exchanged:
    with fsa and sync, `backward` leaves the mean of all workers' gradients. The optimizer stays the script's own:
    schedulers, clipping, GradScaler, parameter groups and state_dict work as before. Parameters with
    requires_grad=False stay as they are.

    Args:
        model: A torch.nn.Module, equal in all workers. Wrap several models one by one. With `--shards` fully_shard has
            divided it over the party's workers before.
        optimizer: An optimizer of the model's parameters, or a list or tuple of several. With `--shards` it is one of
            the DTensors.
        buffers: "local": each worker's own, such as running statistics of batch normalization, until `finish` gives all
            workers those of one. "mean": the means over all workers, with each round (fsa, sync, hfa).

    Returns:
        `optimizer`.

    Raises:
        InvalidSettings: The models differ or cannot be exchanged; the message names the tensor.
        GeomxError: The job has failed.

    Examples:
        >>> optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
    """
    _store().wrap(model, optimizer, buffers)
    return optimizer


def no_sync() -> AbstractContextManager[None]:
    """Return a context in which backward passes accumulate gradients without an exchange, as DistributedDataParallel's.

    The next pass outside of it exchanges the accumulated gradients.

    Examples:
        >>> with geomx.no_sync():
        ...     loss_of(model(first), labels).backward()
        >>> loss_of(model(second), labels).backward()      # exchanges both
    """
    return _store().no_sync()


def finish() -> None:
    """End training: contribute what is left, wait for the other workers, and leave the same tensors in all models.

    A script that ends successfully calls this by itself; call it before evaluating or saving the model. Workers may
    make different numbers of steps: one that has finished no longer counts in means. Afterwards the wrapped optimizers
    cannot step.

    Raises:
        GeomxError: The job has failed.

    Examples:
        >>> geomx.finish()
        >>> if geomx.is_master():
        ...     torch.save(model.state_dict(), "model.pt")
    """
    _store().finish()


def load_data(name: str, split: Literal["train", "test"], data_dir: str | Path = "") -> "TensorDataset":
    """Load a data set of `geomx data fetch`.

    Args:
        name: fashion-mnist, mnist or cifar10.
        split: The half of the data set.
        data_dir: Its directory, if not in the default locations.

    Returns:
        Images, float32 of shape (channels, height, width) from 0 to 1, and int64 labels.

    Raises:
        InvalidSettings: The data set is not on this host.

    Examples:
        >>> images, labels = geomx.load_data("fashion-mnist", "test").tensors
    """
    from geomx_cli.runtime.frontends.torch import data

    return data.load(name, split, data_dir)


def load_text(name: str, split: Literal["train", "test"], data_dir: str | Path = "") -> Any:
    """Load a text of `geomx data fetch`.

    Args:
        name: austen.
        split: All but the last twentieth of the text, or that.
        data_dir: Its directory, if not in the default locations.

    Returns:
        Its bytes, as torch.Tensor, uint8 of shape (n,).

    Raises:
        InvalidSettings: The text is not on this host.

    Examples:
        >>> text = geomx.load_text("austen", "train")
    """
    from geomx_cli.runtime.frontends.torch import data

    return data.load_text(name, split, data_dir)


def shard(dataset: Any, split: str = "iid", seed: int = 1) -> Any:
    """Return this worker's part of a map-style data set. All workers must pass the same arguments.

    Args:
        dataset: A data set with indices. All splits but iid need labels: dataset.targets, dataset.labels or the last
            tensor of a TensorDataset.
        split: As --split of `geomx launch`: iid, by-class, by-party or dirichlet:ALPHA.
        seed: Of the random numbers of dirichlet:ALPHA.

    Returns:
        A torch.utils.data.Subset. Parts are equally large, but for dirichlet.

    Raises:
        InvalidSettings: The data set has no indices or labels, or fewer samples than there are workers.

    Examples:
        >>> loader = DataLoader(geomx.shard(dataset), batch_size=64, shuffle=True)
    """
    from geomx_cli.runtime.frontends.torch import data

    store = _store()
    return data.shard(dataset, store.global_rank, store.num_all_workers, split, seed, store.party_ranks)


def sampler(dataset: Any, *, shuffle: bool = True, seed: int = 1) -> "ShardSampler":
    """Return a sampler that gives each worker another part of the data set in each epoch.

    All workers must pass the same arguments. The next epoch begins with the first iteration after a step of an
    optimizer, so a worker may look at a batch or evaluate with it; docs/how-to/three-lines.md has an exception.

    Args:
        dataset: A data set with indices.
        shuffle: Whether an epoch has an order of its own.
        seed: Of that order.

    Raises:
        InvalidSettings: As `shard`.

    Examples:
        >>> loader = DataLoader(dataset, batch_size=64, sampler=geomx.sampler(dataset))
    """
    from geomx_cli.runtime.frontends.torch import data

    return data.ShardSampler(dataset, _store().global_rank, _store().num_all_workers, shuffle=shuffle, seed=seed)


def global_rank() -> int:
    """Return the rank among the training workers of all parties, from 0.

    Raises:
        InvalidSettings: `init` was not called; `num_all_workers` and `is_master` raise it too.

    Examples:
        >>> torch.save(optimizer.state_dict(), f"checkpoint-{geomx.global_rank()}.pt")
    """
    return _store().global_rank


def num_all_workers() -> int:
    """Return the number of training workers in all parties."""
    return _store().num_all_workers


def is_master() -> bool:
    """Return whether this is the worker of global rank 0, which is to save models."""
    return _store().global_rank == 0


def _store() -> "WrappingStore":
    return load.joined(script.session())
