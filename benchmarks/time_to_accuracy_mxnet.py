"""One worker of MXNet's own dist_sync for time_to_accuracy.py: the bundled network, data, order and initial weights.

Started with the environment of its role; argv: the job's directory, and the options of geomx launch as a JSON object.
`compress` may be 2bit:T, MXNet's own. The optimizer runs on MXNet's servers, with gradients divided by the number of
workers. Rank 0 writes checkpoints, as global rank 0 does with geomx.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from typing import Any

from geomx_cli.runtime.bundled import networks
from geomx_cli.runtime.bundled.checkpoint import Checkpoint, Checkpoints
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.data.samples import Prefetch, shard
from geomx_cli.runtime.frontends.mxnet.gluon_model import GluonModel
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.training.train_config import TrainConfig


def main(job_dir: str, options: dict[str, Any]) -> None:
    config = TrainConfig.from_options(options)
    mx = load_mxnet()
    store, model = mx.kv.create("dist_sync"), networks.find(config.network).build()
    codec, _, threshold = str(options["compress"]).partition(":")
    if codec:
        store.set_gradient_compression({"type": codec, "threshold": float(threshold)})
    assert isinstance(model, GluonModel)
    rank, here = int(os.environ["WORKER_RANK"]), int(options["workers"])
    party = range(rank // here * here, rank // here * here + here)
    own = shard(
        reader.load(config.data, "train", config.data_dir), rank, store.num_workers, config.split, config.seed, party
    )
    model.warm_up(config.batch_size)
    _begin(mx, store, model, config)
    checkpoints = Checkpoints(job_dir, config.save_every, print)
    started, steps, samples = time.monotonic(), 0, 0

    def keep() -> None:
        checkpoints.write(Checkpoint(steps, samples, steps, time.monotonic() - started, model.named_weights()))

    epochs = [own.batches(config.batch_size, seed=config.seed, epoch=e, rank=rank) for e in range(config.epochs)]
    with contextlib.closing(Prefetch(itertools.chain.from_iterable(epochs))) as batches:
        for batch in batches:
            model.forward_backward(batch, 1.0)
            for key, (gradient, weight) in enumerate(zip(model.gradients, model.weights, strict=True)):
                store.push(key, gradient, priority=-key)
                store.pull(key, weight, priority=-key)
            _wait(model)
            steps, samples = steps + 1, samples + len(batch[1])
            if rank == 0 and steps % checkpoints.every == 0:
                keep()
    if rank == 0:
        keep()


def _begin(mx: Any, store: Any, model: GluonModel, config: TrainConfig) -> None:
    """Send the optimizer and the initial weights to the servers, and pull the weights."""
    optimizer = mx.optimizer.create(
        config.optimizer, rescale_grad=1.0 / store.num_workers, wd=0.0, **config.optimizer_params
    )
    store.set_optimizer(optimizer)
    values = model.network.initial_weights(config.seed)
    for key, weight in enumerate(model.weights):
        store.init(key, mx.nd.array(values[model.names[key]]))
        store.pull(key, weight, priority=-key)
    _wait(model)
    store._barrier()


def _wait(model: GluonModel) -> None:
    for weight in model.weights:
        weight.wait_to_read()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
