"""Train a CNN, gradients pushed by hand: geomx launch -- python cnn.py

Every worker runs this file. The servers sum the gradients of all workers of all sites, the optimizer on the global
servers updates the weights with the sums, and all workers pull the new weights. With a store of type "dist_async" no
site waits for another. A gluon.Trainer with the store does the same, as in the train.py of `geomx init`. geomx.state
saves the training, so that a killed worker goes on at the same batch.
"""

import argparse
import os
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
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--data-dir", default="", help="where Fashion-MNIST lies, if not where geomx looks for it")
    given = parser.parse_args()

    seed = int(os.environ.get("GEOMX_SEED", "1"))  # geomx launch --seed, and another one for each run of geomx sweep
    mx.random.seed(seed)
    kv = geomx.init("dist_sync")
    net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
    weights = [parameter.data() for parameter in net.collect_params().values()]
    grads = [parameter.grad() for parameter in net.collect_params().values()]
    keys = list(range(len(weights)))
    if geomx.is_master():
        kv.set_optimizer(mx.optimizer.Adam(learning_rate=given.lr))
    kv.init(keys, weights)
    kv.pull(keys, out=weights)  # every worker gets the master's weights
    if geomx.global_rank() < 0:
        return  # the master worker only sets the job up and does not train
    # Each worker trains on its own part of the data.
    mine = geomx.shard(geomx.load_data("fashion-mnist", "train", given.data_dir))
    test = geomx.load_data("fashion-mnist", "test", given.data_dir)
    state = geomx.state(net=net)  # save it between batches: a killed worker goes on there
    for epoch in state.epochs(given.epochs):
        batches = mine.batches(given.batch_size, seed=seed, epoch=epoch, rank=geomx.global_rank())
        for images, labels in state.batches(batches):
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images)), mx.nd.array(labels))
            loss.backward()
            geomx.report(samples=len(labels), loss=loss.mean())  # shown by geomx launch, status, dashboard and draw
            for key, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
                # All layers are in flight at once; the first one's result is needed first, so it has priority.
                kv.push(key, grad / (len(labels) * geomx.num_all_workers()), priority=-key)
                kv.pull(key, out=weight, priority=-key)
        if geomx.global_rank() == 0:
            geomx.report(accuracy=accuracy(net, test))
    if geomx.global_rank() == 0:
        net.save_parameters(str(Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.params")))  # geomx fetch


if __name__ == "__main__":
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU, as gpu(0).
    with mx.gpu(0) if os.environ.get("GEOMX_DEVICE") else mx.cpu():
        main()
