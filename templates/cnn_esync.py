"""Train a CNN on unequal machines: geomx launch --algo esync -- python cnn_esync.py

Every worker runs this file with its own optimizer. Whenever ESync's state server says so it pushes the difference, old
weights minus new ones, and continues from the mean of all workers: the slowest one after each step, the others after as
many as they have time for.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet import autograd, gluon

import geomx_cli.mxnet as geomx


def network() -> Any:
    """Two convolutional and two dense layers for images of 28 x 28."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(16, 5, in_channels=1, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Conv2D(32, 5, in_channels=16, activation="relu"),
        gluon.nn.MaxPool2D(),
        gluon.nn.Dense(128, in_units=512, activation="relu"),
        gluon.nn.Dense(10, in_units=128),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def accuracy(net: Any, test: geomx.Samples) -> float:
    """The fraction of the test images that the network classifies correctly."""
    right = 0
    for first in range(0, len(test), 500):
        images, labels = test.take(slice(first, first + 500))
        right += int((net(mx.nd.array(images)).asnumpy().argmax(axis=1) == labels).sum())
    return right / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in the batch of each worker")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--data-dir", default="", help="where Fashion-MNIST lies, if not where geomx looks for it")
    given = parser.parse_args()

    seed = int(os.environ.get("GEOMX_SEED", "1"))  # geomx launch --seed, and another one for each run of geomx sweep
    mx.random.seed(seed)
    kv = geomx.init("dist_sync")
    if kv.option("algo") != "esync":
        sys.exit("start it with: geomx launch --algo esync -- python cnn_esync.py")
    net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
    weights = [parameter.data() for parameter in net.collect_params().values()]
    keys = list(range(len(weights)))
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": given.lr}, kvstore=None)
    kv.init(keys, weights)
    kv.pull(keys, out=weights)  # every worker gets the master's weights
    if geomx.global_rank() < 0:
        return  # the master worker only sets the job up and does not train
    before, esync = [weight.copy() for weight in weights], kv.esync_client()

    def exchange() -> None:
        """Push what the local steps have changed, and continue from the mean of all workers."""
        for key, weight in enumerate(weights):
            kv.push(key, before[key] - weight, priority=-key)
            kv.pull(key, out=weight, priority=-key)
        before[:] = [weight.copy() for weight in weights]

    # Each worker trains on its own part of the data.
    mine = geomx.shard(geomx.load_data("fashion-mnist", "train", given.data_dir))
    test = geomx.load_data("fashion-mnist", "test", given.data_dir)
    state = geomx.state(net=net, trainer=trainer, before=before)  # what training changes
    esync.begin()
    for epoch in state.epochs(given.epochs):
        batches = mine.batches(given.batch_size, seed=seed, epoch=epoch, rank=geomx.global_rank())
        for images, labels in state.batches(batches):
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images)), mx.nd.array(labels))
            loss.backward()
            geomx.report(samples=len(labels), loss=loss.mean())  # shown by geomx launch, status, dashboard and draw
            trainer.step(len(labels))
            mx.nd.waitall()  # so that ESync measures whole steps
            if esync.step():
                exchange()
                mx.nd.waitall()
                esync.begin()
        if geomx.global_rank() == 0:
            geomx.report(accuracy=accuracy(net, test))
    esync.leave()  # the others no longer wait for this worker's steps
    exchange()  # the last steps too
    if geomx.global_rank() == 0:
        geomx.report(accuracy=accuracy(net, test))
        net.save_parameters(str(Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.params")))  # geomx fetch


if __name__ == "__main__":
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU, as gpu(0).
    with mx.gpu(0) if os.environ.get("GEOMX_DEVICE") else mx.cpu():
        main()
