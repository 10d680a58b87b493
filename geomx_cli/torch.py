"""The API for PyTorch scripts: an optimizer made distributed, this worker's ranks, and its part of the data.

    import geomx_cli.torch as geomx

    geomx.init()
    dataset = geomx.shard(dataset)
    optimizer = geomx.wrap(model, optimizer)

Scripts of frameworks need one line: geomx.hf.Callback() with HF's Trainer, geomx.lightning.Strategy() with Lightning.

Scripts run under `geomx launch` or `python -m geomx_cli.runtime`, with one job per process. Call all functions except
`report` from the training thread. After the job has failed, these functions, `backward` and `step` raise GeomxError.
Its `hint` says what to do. With --p3 the first use of a tensor that has not arrived yet raises it too.
"""

import importlib
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if __name__ == "torch":  # geomx's own folder precedes the real torch on sys.path
    raise ImportError(f"{__file__} is not PyTorch: take its folder off sys.path and PYTHONPATH")

from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError, InvalidSettings
from geomx_cli.runtime import script
from geomx_cli.runtime.frontends import finder
from geomx_cli.runtime.frontends.torch import load
from geomx_cli.runtime.script.reports import report

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.data import ShardSampler, TensorDataset
    from geomx_cli.runtime.frontends.torch.store import Store
    from geomx_cli.runtime.frontends.torch.trainers import hf as hf  # noqa: PLC0414  # see __getattr__
    from geomx_cli.runtime.frontends.torch.trainers import lightning as lightning  # noqa: PLC0414
    from geomx_cli.runtime.frontends.torch.training_state import TorchState

__all__ = [
    "DiLoCo", "GeomxError", "InvalidSettings", "LocalSGD", "Training", "finish", "global_rank", "init", "is_master",
    "load_data", "load_text", "no_sync", "num_all_workers", "report", "sampler", "shard", "should_stop",
    "state", "wrap",
]  # fmt: skip

_Optimizer = TypeVar("_Optimizer")  # or a list or tuple of some
_TRAINERS = {"hf": "pip install transformers accelerate", "lightning": "pip install lightning"}


def __getattr__(name: str) -> Any:
    """Return the module `hf` or `lightning`, which imports its framework. Raises InvalidSettings if the import fails.
    """
    if name not in _TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return importlib.import_module(f"geomx_cli.runtime.frontends.torch.trainers.{name}")
    except ImportError as error:
        raise InvalidSettings(f"geomx.{name}: {error}", _TRAINERS[name]) from error


def init() -> None:
    """Join the job, and block until all of its processes have joined. Later calls have no effect.

    In a master worker that does not train, `init` ends the process with status 0. With `--shards`, it creates the
    default group of torch.distributed, which has the party's workers.

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

    All workers get the parameters and buffers of the master worker. `geomx launch --algo` chooses what is exchanged.
    With fsa and sync, `p.grad` is the mean of all workers' gradients after `backward`. `wrap` returns the script's own
    optimizer: schedulers, clipping, GradScaler, parameter groups and state_dict work as before. Parameters with
    requires_grad=False do not change.

    Args:
        model: A torch.nn.Module, equal in all workers. Wrap several models one by one. With `--shards`, first divide it
            over the party's workers with fully_shard.
        optimizer: An optimizer of the model's parameters, or a list or tuple of several. With `--shards` it has the
            DTensors of the divided model.
        buffers: "local": each worker has its own buffers, such as running statistics of batch normalization, until
            `finish` gives all workers the buffers of one worker. "mean": in each round all workers get the mean of the
            buffers (fsa, sync, hfa).

    Returns:
        `optimizer`.

    Raises:
        InvalidSettings: The models differ or cannot be exchanged; the message names the tensor.
        GeomxError: The job has failed.

    Examples:
        >>> optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05))
    """
    _store().wrap_for_loop(model, optimizer, buffers)
    return optimizer


def state(**given: Any) -> "TorchState":
    """Return the state of this worker's training, which saves itself. A killed worker continues from it.

    Call it after `wrap`, and iterate over epochs and batches through it. It saves between two batches: after each round
    (exchange), and otherwise every two seconds. geomx starts a killed worker again (`--restarts`). Then the script runs
    from its first line, and `state` loads all objects, numbers, and the random states of torch, GPUs, numpy and Python.
    The loops continue at the same batch. If the kernels are deterministic, training ends with the same bits as an
    undisturbed job. With `--reduce torch` and `--shards`, all workers of the party begin again, at the same step.
    Without `state`, a worker that dies after its first step ends the job.

    Args:
        given: Objects that have state_dict and load_state_dict: each wrapped model and optimizer, and also schedulers,
            a GradScaler, averaged models. Numbers become attributes of the state.

    Returns:
        epochs(count): the numbers of the epochs from `state.epoch` on.
        batches(loader): the batches of a pass over a loader, from the batch on at which the worker was killed. A
        DataLoader of a map-style data set loads no earlier batch. A loader with a state_dict restores its own position.
        Any other iterable is read again from its beginning.
        save(): saves now. A loop without `batches` calls it once between two steps that exchange.
        resumed: whether this worker continues after it was killed. epoch, and each given number: its present value.

    Raises:
        InvalidSettings: A wrapped model or optimizer is missing, or an object has a value that cannot be saved.
        GeomxError: The job has failed.

    Examples:
        >>> state = geomx.state(model=model, optimizer=optimizer, scheduler=scheduler, best=0.0)
        >>> for epoch in state.epochs(10):
        ...     for images, labels in state.batches(loader):
        ...         ...
    """
    from geomx_cli.runtime.frontends.torch.training_state import TorchState

    return TorchState(_store(), given)


def no_sync() -> AbstractContextManager[None]:
    """Return a context manager in which backward passes accumulate gradients without an exchange.

    The next backward pass outside of it exchanges the accumulated gradients, as with DistributedDataParallel's no_sync.

    Examples:
        >>> with geomx.no_sync():
        ...     loss_of(model(first), labels).backward()
        >>> loss_of(model(second), labels).backward()      # exchanges both
    """
    return _store().no_sync()


def finish() -> None:
    """End training: exchange the remaining steps, wait for the other workers, and give all models the same tensors.

    Call it before you evaluate or save the model. geomx calls it when a script ends successfully. Workers may take
    different numbers of steps: a worker that has finished no longer counts in means. After `finish` the wrapped
    optimizers cannot step.

    Raises:
        GeomxError: The job has failed.

    Examples:
        >>> geomx.finish()
        >>> if geomx.is_master():
        ...     torch.save(model.state_dict(), "model.pt")
    """
    _store().finish()


def should_stop() -> bool:
    """Return whether the job is asked to stop: true in all workers at the same step, and from then on.

    A job is asked to stop by `geomx stop`, by Ctrl-C, or by SIGTERM or SIGUSR1 to `geomx launch`, an agent or any
    process of the job. If a worker has called `should_stop` before, geomx gives it the time of `--grace` to save and to
    end by itself. Call `should_stop` in all workers after each step. When the job is asked to stop, one call waits for
    the other workers. With mixed and async, the result is true in all workers of a party at the same step.

    Raises:
        InvalidSettings: `init` was not called.
        GeomxError: The job has failed.

    Examples:
        >>> for step, (images, labels) in enumerate(loader):
        ...     ...                                             # a step of the optimizer
        ...     if geomx.should_stop():
        ...         break
        >>> geomx.finish()
    """
    _store()
    return script.session().should_stop()


class Training(Generic[_Optimizer]):
    """`with Training(model, optimizer):` around a training loop: `wrap` before it, and `finish` after it.

    It is for any `geomx launch --algo`. Call `init` first. The value of the `with` statement is the optimizer. To train
    several models together, write several `Training` objects in one `with` statement; the first one that ends calls
    `finish` for all. If an exception leaves the block, `finish` is not called. If the exception ends this script, the
    other workers' scripts end too, with the exception's text.

    Args:
        model: See `wrap`.
        optimizer: See `wrap`.
        buffers: See `wrap`.

    Examples:
        >>> with geomx.Training(model, optimizer):
        ...     for images, labels in loader:
        ...         ...
    """

    def __init__(self, model: Any, optimizer: _Optimizer, *, buffers: str = "local") -> None:
        self._model, self._optimizer, self._buffers = model, optimizer, buffers

    def __enter__(self) -> _Optimizer:
        store = _store()
        algorithms = plugins.algorithms()
        algorithm = algorithms[str(store.option("algo"))]
        if not self._stands_for(algorithm):
            possible = " or ".join(name for name, each in algorithms.items() if self._stands_for(each))
            what = f"geomx_cli.torch.{type(self).__name__} in a job of --algo {algorithm.name}"
            hint = f"launch it with --algo {possible}, or write geomx_cli.torch.Training for any"
            raise InvalidSettings(what, hint)
        store.wrap_for_loop(self._model, self._optimizer, self._buffers)
        return self._optimizer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            _store().finish()

    def _stands_for(self, algorithm: plugins.Algorithm) -> bool:
        """Whether the class is for jobs with this algorithm."""
        return True


class DiLoCo(Training[_Optimizer]):
    """A `Training` for jobs with --algo diloco: local steps, then an outer step with the mean of the differences.

    Options of `geomx launch` set the number of local steps, the outer learning rate, momentum and fragments.
    """

    def _stands_for(self, algorithm: plugins.Algorithm) -> bool:
        return algorithm.outer_step and not algorithm.asynchronous


class LocalSGD(Training[_Optimizer]):
    """A `Training` for jobs with --algo hfa or esync: local steps, then the mean of all weights.

    With hfa, parties first compute the mean of their own workers (--k1, --k2).
    """

    def _stands_for(self, algorithm: plugins.Algorithm) -> bool:
        return algorithm.exchanges == "weights" and not (algorithm.outer_step or algorithm.standalone)


def load_data(name: str, split: Literal["train", "test"], data_dir: str | Path = "") -> "TensorDataset":
    """Load a data set of `geomx data fetch`.

    Args:
        name: fashion-mnist, mnist or cifar10.
        split: The part of the data set.
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
        split: "test" is the last twentieth of the text, and "train" is the rest.
        data_dir: Its directory, if not in the default locations.

    Returns:
        The bytes of the text, as a uint8 tensor of shape (n,).

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
        split: iid, by-class, by-party or dirichlet:ALPHA, as in --split of `geomx launch`.
        seed: The seed of the random numbers of dirichlet:ALPHA.

    Returns:
        A torch.utils.data.Subset. All parts have the same size, except with dirichlet.

    Raises:
        InvalidSettings: The data set has no indices or labels, or fewer samples than there are workers.

    Examples:
        >>> loader = DataLoader(geomx.shard(dataset), batch_size=64, shuffle=True)
    """
    from geomx_cli.runtime.frontends.torch import data

    store = _store()
    return data.shard(dataset, store.global_rank, store.num_all_workers, split, seed, store.party_ranks)


def sampler(dataset: Any, *, shuffle: bool = True, seed: int = 1) -> "ShardSampler":
    """Return a sampler that gives each worker a different part of the data set in each epoch.

    All workers must pass the same arguments. The next epoch begins with the first iteration after a step of an
    optimizer. So a worker may look at a batch, or evaluate with the sampler; docs/how-to/three-lines.md has an
    exception.

    Args:
        dataset: A data set with indices.
        shuffle: Whether each epoch has a random order.
        seed: The seed of this order.

    Raises:
        InvalidSettings: The data set has no indices, or fewer samples than there are workers.

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
    """Return whether this worker has global rank 0. Let this worker save models."""
    return _store().global_rank == 0


def _store() -> "Store":
    return load.joined(script.session())
