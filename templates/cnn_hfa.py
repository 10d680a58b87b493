"""Train a CNN, sites averaging now and then: geomx launch --algo hfa --k1 20 --k2 10 -- python cnn_hfa.py

Every worker runs this file with its own optimizer. Every K1 steps it pushes its share of the site's mean weights and
continues from that mean; for every K2-th mean, the servers average over the sites.
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
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--data-dir", default="", help="where Fashion-MNIST lies, if not where geomx looks for it")
    given = parser.parse_args()

    seed = int(os.environ.get("GEOMX_SEED", "1"))  # geomx launch --seed, and another one for each run of geomx sweep
    mx.random.seed(seed)
    kv = geomx.init("dist_sync")
    if kv.option("algo") != "hfa":
        sys.exit("start it with: geomx launch --algo hfa -- python cnn_hfa.py")
    net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
    weights = [parameter.data() for parameter in net.collect_params().values()]
    keys = list(range(len(weights)))
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": given.lr}, kvstore=None)
    kv.init(keys, weights)
    kv.pull(keys, out=weights)  # every worker gets the master's weights
    if geomx.global_rank() < 0:
        return  # the master worker only sets the job up and does not train
    steps, k1, k2 = 0, kv.option("k1"), kv.option("k2")

    def exchange() -> None:
        """Push this worker's share of the site's mean weights, and continue from that mean."""
        for key, weight in enumerate(weights):
            kv.push(key, weight / kv.num_workers, priority=-key)
            kv.pull(key, out=weight, priority=-key)

    # Each worker trains on its own part of the data.
    mine = geomx.shard(geomx.load_data("fashion-mnist", "train", given.data_dir))
    test = geomx.load_data("fashion-mnist", "test", given.data_dir)
    for epoch in range(given.epochs):
        for images, labels in mine.batches(given.batch_size, seed=seed, epoch=epoch, rank=geomx.global_rank()):
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images)), mx.nd.array(labels))
            loss.backward()
            geomx.report(samples=len(labels), loss=loss.mean())  # shown by geomx launch, status, dashboard and draw
            trainer.step(len(labels))
            steps += 1
            if steps % k1 == 0:
                exchange()
        if geomx.global_rank() == 0:
            geomx.report(accuracy=accuracy(net, test))
    # The last steps too: push until the next mean over the sites, with which all workers end.
    for _ in range(-(-steps // (k1 * k2)) * k2 - steps // k1):
        exchange()
    if geomx.global_rank() == 0:
        geomx.report(accuracy=accuracy(net, test))
        net.save_parameters(str(Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.params")))  # geomx fetch


if __name__ == "__main__":
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU, as gpu(0).
    with mx.gpu(0) if os.environ.get("GEOMX_DEVICE") else mx.cpu():
        main()
