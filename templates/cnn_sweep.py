"""Compare algorithms that train a CNN: geomx sweep --algo fsa hfa diloco -- python cnn_sweep.py

One of them alone: geomx launch --algo fsa -- python cnn_sweep.py

Every worker runs this file with its own optimizer, or in fsa with that of the servers. `kv.option` says which algorithm
the job has, and its options: "k1" and "k2" in hfa, "inner_steps", "outer_lr" and "outer_momentum" in diloco.
geomx.state saves the training, so that a killed worker goes on at the same batch.
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


def server_optimizer(kv: Any, lr: float) -> Any:
    """In fsa the only optimizer; in diloco the outer one."""
    if kv.option("algo") == "fsa":
        return mx.optimizer.Adam(learning_rate=lr)
    return mx.optimizer.NAG(learning_rate=kv.option("outer_lr"), momentum=kv.option("outer_momentum"))


def steps_of(kv: Any) -> tuple[int, int]:
    """Steps of a worker between two pushes, and between two exchanges of the sites."""
    algo = kv.option("algo")
    if algo not in ("fsa", "hfa", "diloco"):
        sys.exit(f"this script has no part for --algo {algo}: take fsa, hfa or diloco")
    every = {"fsa": 1, "hfa": kv.option("k1"), "diloco": kv.option("inner_steps")}[algo]
    return every, every * kv.option("k2") if algo == "hfa" else every


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in the batch of each worker")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--data-dir", default="", help="where Fashion-MNIST lies, if not where geomx looks for it")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    seed = int(os.environ.get("GEOMX_SEED", "1"))  # geomx launch --seed, and another one for each run of geomx sweep
    mx.random.seed(seed)
    kv = geomx.init("dist_sync")
    algo, (every, together) = kv.option("algo"), steps_of(kv)
    net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
    weights = [parameter.data() for parameter in net.collect_params().values()]
    grads = [parameter.grad() for parameter in net.collect_params().values()]
    keys = list(range(len(weights)))
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": given.lr}, kvstore=None)
    if geomx.is_master() and algo != "hfa":  # in hfa the servers average
        kv.set_optimizer(server_optimizer(kv, given.lr))
    kv.init(keys, weights)
    kv.pull(keys, out=weights)  # every worker gets the master's weights
    if geomx.global_rank() < 0:
        return  # the master worker only sets the job up and does not train
    before = [weight.copy() for weight in weights]
    state = geomx.state(net=net, trainer=trainer, before=before, steps=0, pushes=0)  # what training changes

    def exchange(samples: int = 1) -> None:
        """Push this worker's part of the next weights of all, and continue from these."""
        for key, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            if algo == "fsa":  # the sum of all gradients
                pushed = grad / (samples * geomx.num_all_workers())
            elif algo == "hfa":  # the site's mean weights
                pushed = weight / kv.num_workers
            else:  # what the inner steps have changed
                pushed = before[key] - weight
            kv.push(key, pushed, priority=-key)
            kv.pull(key, out=weight, priority=-key)
        if algo == "diloco":
            before[:] = [weight.copy() for weight in weights]
        state.pushes += 1

    # Each worker trains on its own part of the data.
    mine = geomx.shard(geomx.load_data("fashion-mnist", "train", given.data_dir))
    test = geomx.load_data("fashion-mnist", "test", given.data_dir)
    for epoch in state.epochs(given.epochs):
        batches = mine.batches(given.batch_size, seed=seed, epoch=epoch, rank=geomx.global_rank())
        for images, labels in state.batches(batches):
            with autograd.record():
                loss = loss_of(net(mx.nd.array(images)), mx.nd.array(labels))
            loss.backward()
            geomx.report(samples=len(labels), loss=loss.mean())  # shown by geomx launch, status, dashboard and draw
            if algo != "fsa":
                trainer.step(len(labels))
            state.steps += 1
            if state.steps % every == 0:
                exchange(len(labels))
        if geomx.global_rank() == 0:
            geomx.report(accuracy=accuracy(net, test))
    # The last steps too: push until the sites exchange once more, so that all workers end with the same weights.
    while state.pushes * every < state.steps or state.pushes * every % together:
        exchange()
        state.save()  # between two pushes
    if geomx.global_rank() == 0:
        geomx.report(accuracy=accuracy(net, test))
        net.save_parameters(str(Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.params")))  # geomx fetch


if __name__ == "__main__":
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU, as gpu(0).
    with mx.gpu(0) if os.environ.get("GEOMX_DEVICE") else mx.cpu():
        main()
