"""The API for MXNet scripts: the job's store, this worker's ranks, and its part of the data.

    import geomx_cli.mxnet as geomx

    kv = geomx.init("dist_sync")
    mine = geomx.shard(geomx.load_data("fashion-mnist", "train"))
    geomx.report(step=step, samples=len(labels), loss=loss.mean())

Scripts run under `geomx launch` or `python -m geomx_cli.runtime`, with one job per process. Call all functions except
`report` from the training thread. The API is optional: a plain MXNet script gets the same store from `mx.kv.create`.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if __name__ == "mxnet":  # geomx's own folder precedes the real mxnet on sys.path
    raise ImportError(f"{__file__} is not MXNet: take its folder off sys.path and PYTHONPATH")

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime import script
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.data.samples import Samples
from geomx_cli.runtime.data.samples import shard as shard_of
from geomx_cli.runtime.frontends import finder
from geomx_cli.runtime.frontends.mxnet import load
from geomx_cli.runtime.frontends.mxnet.kvstore import KVStore
from geomx_cli.runtime.script.reports import report

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.mxnet.training_state import MxnetState

__all__ = [
    "InvalidSettings", "KVStore", "Samples", "fit", "global_rank", "init", "is_master", "load_data", "num_all_workers",
    "report", "shard", "should_stop", "state",
]  # fmt: skip

load.prepare_import()  # for `import mxnet` after this, also in a script that runs alone


def init(kind: str = "dist_sync") -> KVStore:
    """Join the job, and block until all of its processes have joined; equivalent to `mx.kv.create(kind)`.

    Args:
        kind: "dist_sync", or "dist_async" for parties that do not wait for each other.

    Returns:
        The job's store. Each call returns the same store.

    Raises:
        MXNetError: The job has failed, or the environment names no job.
        InvalidSettings: The process was not started by geomx, or a store of this type does not join a job.

    Examples:
        >>> import geomx_cli.mxnet as geomx
        >>> kv = geomx.init("dist_sync")
    """
    if not (finder.installed() or script.session().attached):  # else a failure of the script would not be reported
        hint = f"geomx launch -- python {sys.argv[0]}, or python -m geomx_cli.runtime {sys.argv[0]}"
        raise InvalidSettings("this script was not started by geomx", hint)
    store = load.load_mxnet().kv.create(kind)
    if not isinstance(store, KVStore):
        raise InvalidSettings(f"a store of type {kind!r} does not join a job", "choose dist_sync or dist_async")
    return store


def state(**given: Any) -> "MxnetState":
    """Return the state of this worker's training, which saves itself. A killed worker continues from it.

    Call it once, after `kv.init` or after the Trainer is made, and iterate over epochs and batches through it. Between
    two batches it waits for the results of the script's pushes, and saves if they have changed the state. Otherwise it
    saves every two seconds. geomx starts a killed worker again (`--restarts`). Then the script runs from its first
    line, and `state` loads all objects, the store's state, and the random states of numpy and Python. The loops
    continue at the same batch, and training ends with the same bits as an undisturbed job. `state` seeds MXNet's random
    numbers before each batch, so a restarted worker draws the same numbers. Without `state`, a worker that dies after
    its first push ends the job.

    Args:
        given: What training changes: gluon blocks and Trainers, Modules, optimizers, updaters, arrays and lists of
            arrays, and objects with state_dict and load_state_dict. Numbers become attributes of the state: also counts
            of steps, which an `enumerate` would begin anew. The optimizer of `kv.set_optimizer` need not be given.

    Returns:
        epochs(count): the numbers of the epochs from `state.epoch` on.
        batches(loader): the batches of a pass over a loader, from the batch on at which the worker was killed. A gluon
        DataLoader and an NDArrayIter load no earlier batch. A loader with a state_dict restores its own position. Any
        other iterable is read again from its beginning.
        save(): saves now. A loop without `batches` calls it once between two pushes of a key.
        resumed: whether this worker continues after it was killed. epoch, and each given number: its present value.

    Raises:
        InvalidSettings: A network or a Trainer is missing, a shape is not known yet, or an object cannot be saved.
        MXNetError: The job has failed.

    Examples:
        >>> state = geomx.state(net=net, trainer=trainer, steps=0)
        >>> for epoch in state.epochs(10):
        ...     for images, labels in state.batches(loader):
        ...         ...
    """
    from geomx_cli.runtime.frontends.mxnet.script_objects import prepare_trainer
    from geomx_cli.runtime.frontends.mxnet.training_state import MxnetState

    for each in given.values():
        if isinstance(each, load.load_mxnet().gluon.Trainer):
            prepare_trainer(each)
    return MxnetState(_store().kept, given)


def fit(module: Any, train_data: Any, **arguments: Any) -> None:
    """Train a Module like `module.fit(train_data, ...)`, and save like `state`. A killed worker continues at the same
    batch.

    Call it once, in place of `module.fit`. The iterator returns to its batch as with `state`. In the epoch in which a
    killed worker continues, metrics cover only the rest of the epoch.

    Args:
        module: A mx.mod.Module or mx.mod.BucketingModule.
        train_data: The iterator of the training data.
        arguments: All other arguments of `fit`, by name, with kvstore="dist_sync" or a store.

    Raises:
        InvalidSettings: The module overrides `fit`, or its store is not the job's.
        MXNetError: The job has failed.

    Examples:
        >>> geomx.fit(module, iterator, kvstore="dist_sync", optimizer="sgd", num_epoch=10)
    """
    from geomx_cli.runtime.frontends.mxnet.module_fit import fit as fit_and_save

    fit_and_save(module, train_data, lambda: _store().kept, **arguments)


def global_rank() -> int:
    """Return the rank among the training workers of all parties, from 0; -1 for a master that does not train.

    Raises:
        InvalidSettings: `init` was not called; `num_all_workers` and `is_master` raise it too.
    """
    return _store().global_rank


def num_all_workers() -> int:
    """Return the number of training workers in all parties."""
    return _store().num_all_workers


def is_master() -> bool:
    """Return whether this worker is the master worker, which sets the initial weights and calls `kv.set_optimizer`."""
    return _store().is_master_worker


def should_stop() -> bool:
    """Return whether the job is asked to stop: true in all workers after the same push, and from then on.

    A job is asked to stop by `geomx stop`, by Ctrl-C, or by SIGTERM or SIGUSR1 to `geomx launch`, an agent or any
    process of the job. If a worker has called `should_stop` before, geomx gives it the time of `--grace` to save and to
    end by itself. Call `should_stop` in all workers after each step. When the job is asked to stop, one call waits for
    the other workers. In an asynchronous job, the result is true in all workers of a party after the same push.

    Raises:
        InvalidSettings: `init` was not called.
        GeomxError: The job has failed.

    Examples:
        >>> for batch in batches:
        ...     ...                                             # a step of the trainer
        ...     if geomx.should_stop():
        ...         break
    """
    _store()
    return script.session().should_stop()


def load_data(name: str, split: Literal["train", "test"], data_dir: str | Path = "") -> Samples:
    """Load a data set of `geomx data fetch`.

    Args:
        name: fashion-mnist, mnist or cifar10.
        split: The part of the data set.
        data_dir: Its directory, if not in the default locations.

    Returns:
        Images of shape (n, channels, height, width), and labels of shape (n,).

    Raises:
        InvalidSettings: The data set is not on this host.
    """
    return reader.load(name, split, data_dir)


def shard(samples: Samples, split: str = "iid", seed: int = 1) -> Samples:
    """Return a copy of this worker's part of the data. All workers must pass the same arguments.

    Args:
        samples: The whole data set.
        split: iid, by-class, by-party or dirichlet:ALPHA, as in --split of `geomx launch`.
        seed: The seed of the random numbers of dirichlet:ALPHA.

    Raises:
        InvalidSettings: There are fewer samples than workers, or this is a master that does not train.

    Examples:
        >>> mine = geomx.shard(geomx.load_data("fashion-mnist", "train"))
    """
    store = _store()
    if not store.trains:
        what = "this worker is a master that does not train, and has no data"
        raise InvalidSettings(what, "call shard only where geomx.global_rank() is not -1")
    return shard_of(samples, store.global_rank, store.num_all_workers, split, seed, store.party_ranks)


def _store() -> KVStore:
    store = script.session().store
    if not isinstance(store, KVStore):
        raise InvalidSettings("this worker has not joined the job", "call geomx_cli.mxnet.init first")
    return store
