"""A script of recovery_scripts.py: a small model in MXNet, whose training geomx saves.

    MODEL EPOCHS PAUSE     trainer (a gluon Trainer) or module (Module.fit); seconds that each step sleeps

With fsa the optimizer runs on the servers. With hfa and diloco each worker has its own, and pushes weights, or what has
changed, after several steps. In the end each worker writes what has to be as in a job without kills to found.json in
its output folder.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import geomx_cli.mxnet as geomx

SAMPLES, BATCH, PRIME = 320, 8, (1 << 31) - 1  # an epoch of a worker of two has 20 steps


class Job:
    """What both models have: the store, the job's algorithm, this worker's data and command line."""

    def __init__(self) -> None:
        self.kind, self.epochs, self.pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
        self.store = geomx.init("dist_sync")
        self.algorithm = str(self.store.option("algo"))
        self.is_local = self.algorithm != "fsa"
        rank, workers = geomx.global_rank(), geomx.num_all_workers()
        mx.random.seed(7)
        np.random.seed(11 + rank)
        random = np.random.default_rng(3)
        self.images = random.normal(size=(SAMPLES, 1, 6, 6)).astype(np.float32)[rank::workers]
        self.labels = random.integers(0, 4, SAMPLES).astype(np.float32)[rank::workers]
        self.scale = 1 / (BATCH * workers) if self.algorithm == "fsa" else 1 / BATCH
        steps = {"fsa": "", "hfa": "k1", "diloco": "inner_steps"}[self.algorithm]
        self.every = int(self.store.option(steps)) if steps else 1

    def prepare(self, weights: Sequence[Any]) -> list[Any]:
        """Give all workers the same weights, and the servers what they need for local steps; returns copies."""
        if geomx.is_master() and self.algorithm == "diloco":
            rate, momentum = self.store.option("outer_lr"), self.store.option("outer_momentum")
            self.store.set_optimizer(mx.optimizer.NAG(learning_rate=rate, momentum=momentum))
        keys = list(range(len(weights)))
        self.store.init(keys, list(weights))
        self.store.pull(keys, out=list(weights))
        return [weight.copy() for weight in weights]

    def exchange(self, weights: Sequence[Any], before: list[Any]) -> None:
        """Push this worker's part of the next weights of all, and continue from these."""
        for key, weight in enumerate(weights):
            pushed = weight if self.algorithm == "hfa" else before[key] - weight  # a party's only worker is its mean
            self.store.push(key, pushed, priority=-key)
            self.store.pull(key, out=weight, priority=-key)
        before[:] = [weight.copy() for weight in weights]

    def end_step(self) -> None:
        """A step is done."""
        time.sleep(self.pause)
        geomx.report(samples=BATCH)

    def keep(self, arrays: Sequence[Any], optimizer: Any, updater: Any, samples: int) -> None:
        """Write what has to be as without kills. updater: runs the optimizer; None if the servers do."""
        folder = Path(os.environ["GEOMX_OUTPUT_DIR"])
        if updater is None:
            self.store.save_optimizer_states(str(folder / "states.npz"))
            with np.load(folder / "states.npz") as file:
                states = [file[name] for name in sorted(file.files)]
        else:
            states = [_flat(updater.states[key]) for key in sorted(updater.states)]
        found = {"weights": _digest(arrays), "optimizer": _digest(states), "rate": optimizer.learning_rate}
        found |= {"updates": optimizer.num_update, "samples": samples, "random": np.random.rand()}
        (folder / "found.json").write_text(json.dumps(found))


def train_network(job: Job) -> None:
    """A convolutional network with dropout and running means; a gluon Trainer."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3, in_channels=1), gluon.nn.BatchNorm(in_channels=4), gluon.nn.Flatten())
    net.add(gluon.nn.Dropout(0.3), gluon.nn.Dense(4, in_units=64))
    net.initialize(mx.init.Xavier())
    every = list(net.collect_params().values())
    weights = [parameter.data() for parameter in every if parameter.grad_req != "null"]
    optimizer = mx.optimizer.Adam(learning_rate=0.01, lr_scheduler=_schedule())
    before = job.prepare(weights) if job.is_local else []
    if geomx.global_rank() < 0:
        return  # a master that does not train
    trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=None if job.is_local else job.store)
    own = {"before": before} if job.is_local else {}
    state = geomx.state(net=net, trainer=trainer, steps=0, samples=0, **own)
    data = gluon.data.ArrayDataset(job.images, job.labels, np.arange(len(job.labels)))
    loader = gluon.data.DataLoader(data, BATCH, shuffle=True)
    for _ in state.epochs(job.epochs):
        for images, labels, indices in state.batches(loader):
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(images), labels)
            loss.backward()
            trainer.step(1 / job.scale)
            state.steps += 1
            state.samples = _chain(state.samples, indices.asnumpy())
            if job.is_local and state.steps % job.every == 0:
                job.exchange(weights, before)
            job.end_step()
    updater = trainer._updaters[0] if job.is_local else None
    job.keep([parameter.data() for parameter in every], optimizer, updater, state.samples)


def train_module(job: Job) -> None:
    """A Module with dropout and running means; its `fit`. What it counts are attributes of its optimizer."""
    net = mx.sym.Dropout(mx.sym.BatchNorm(mx.sym.Flatten(mx.sym.Variable("data"))), p=0.3)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=4), name="softmax")
    module = mx.mod.Module(net)
    job.images[:, 0, 0, 0] = np.arange(len(job.images)) / SAMPLES  # says which sample it is
    data = mx.io.NDArrayIter(job.images, job.labels, BATCH, shuffle=True)
    optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=job.scale, lr_scheduler=_schedule())
    optimizer.samples = 0
    store = None if job.is_local else job.store
    if job.is_local:
        module.bind(data.provide_data, data.provide_label)
        module.init_params(mx.init.Xavier())
        arguments, auxiliary = module.get_params()
        optimizer.before = job.prepare([array for _, array in sorted(arguments.items())])
        module.set_params(arguments, auxiliary)
    if geomx.global_rank() < 0:
        return

    def end_batch(given: Any) -> None:
        batch = given.locals["data_batch"].data[0].asnumpy()[:, 0, 0, 0]
        optimizer.samples = _chain(optimizer.samples, np.rint(batch * SAMPLES))
        if job.is_local and optimizer.num_update % job.every == 0:
            arguments, auxiliary = module.get_params()
            job.exchange([array for _, array in sorted(arguments.items())], optimizer.before)
            module.set_params(arguments, auxiliary)
        job.end_step()

    geomx.fit(
        module, data, kvstore=store, optimizer=optimizer, num_epoch=job.epochs, batch_end_callback=end_batch,
        initializer=mx.init.Xavier(),
    )  # fmt: skip
    arrays = [array for named in module.get_params() for _, array in sorted(named.items())]
    job.keep(arrays, optimizer, module._updater if job.is_local else None, optimizer.samples)


def _schedule() -> Any:
    return mx.lr_scheduler.FactorScheduler(7, 0.9, base_lr=0.05)


def _chain(samples: int, indices: Any) -> int:
    """A number that is the same only for the same samples in the same order."""
    for index in indices.tolist():
        samples = (samples * 1_000_003 + int(index) + 1) % PRIME
    return samples


def _flat(state: Any) -> Any:
    """An optimizer's arrays of one weight as one."""
    arrays = state if isinstance(state, tuple) else (state,)
    return np.concatenate([array.asnumpy().reshape(-1) for array in arrays if array is not None])


def _digest(arrays: Sequence[Any]) -> str:
    content = [each.asnumpy() if isinstance(each, mx.nd.NDArray) else each for each in arrays]
    return hashlib.sha256(b"".join(array.tobytes() for array in content)).hexdigest()


if __name__ == "__main__":
    given = Job()
    {"trainer": train_network, "module": train_module}[given.kind](given)
