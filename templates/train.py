"""Train a small network with MXNet over all sites: geomx launch -- python train.py --epochs 2

Every worker runs this file. kv.create("dist_sync") connects it to the others; geomx.state saves its training, so that a
killed worker goes on at the same batch. The rest is plain MXNet. The data are generated here, pictures of discs,
squares and crosses with noise; replace `pictures` with your own.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import geomx_cli.mxnet as geomx

SIZE, KINDS = 24, 3


def pictures(count: int, seed: int) -> tuple[Any, Any]:
    """`count` pictures, float32 of shape (count, 1, SIZE, SIZE), and their classes: 0, 1 or 2."""
    random = np.random.default_rng(seed)
    kinds = random.integers(0, KINDS, count)
    y, x = np.mgrid[:SIZE, :SIZE]
    images = random.normal(0, 0.3, (count, 1, SIZE, SIZE)).astype(np.float32)
    for image, kind in zip(images[:, 0], kinds, strict=True):
        row, column = random.uniform(8, SIZE - 8, 2)
        radius = random.uniform(4, 7)
        down, right = np.abs(y - row), np.abs(x - column)
        disc, square = down**2 + right**2 < radius**2, np.maximum(down, right) < radius
        cross = square & (np.minimum(down, right) < 1.5)
        image[(disc, square, cross)[kind]] += 1
    return images, kinds.astype(np.float32)


def network() -> Any:
    """A convolutional and two dense layers."""
    net = gluon.nn.HybridSequential()
    net.add(
        gluon.nn.Conv2D(8, 5, strides=2, in_channels=1, activation="relu"),
        gluon.nn.Flatten(),
        gluon.nn.Dense(32, in_units=800, activation="relu"),
        gluon.nn.Dense(KINDS, in_units=32),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="samples in the batch of each worker")
    parser.add_argument("--samples", type=int, default=1280, help="samples of each worker")
    parser.add_argument("--lr", type=float, default=0.005)
    given = parser.parse_args()

    seed = int(os.environ.get("GEOMX_SEED", "1"))  # geomx launch --seed, and another one for each run of geomx sweep
    mx.random.seed(seed)
    kv = mx.kv.create("dist_sync")
    # With devices = ["gpu0"] in the inventory each worker sees only its own GPU, as gpu(0).
    with mx.gpu(0) if os.environ.get("GEOMX_DEVICE") else mx.cpu():
        net, loss_of = network(), gluon.loss.SoftmaxCrossEntropyLoss()
        # The optimizer runs on the global servers, on the sum of the gradients of all workers of all sites.
        trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": given.lr}, kvstore=kv)
        own = 1000 * seed + 1 + max(0, kv.global_rank)  # different data for every worker, and others than the test's
        images, kinds = pictures(given.samples, seed=own)
        loader = gluon.data.DataLoader(gluon.data.ArrayDataset(images, kinds), given.batch_size)
        test_images, test_kinds = pictures(600, seed=0)
        state = geomx.state(net=net, trainer=trainer)  # saves both between batches
        for epoch in state.epochs(given.epochs):
            for batch, wanted in state.batches(loader):
                with autograd.record():
                    loss = loss_of(net(batch), wanted)
                loss.backward()
                trainer.step(given.batch_size * kv.num_all_workers)
                geomx.report(samples=given.batch_size, loss=loss.mean())  # shown by geomx launch, status, draw
            guesses = net(mx.nd.array(test_images)).asnumpy().argmax(axis=1)
            accuracy = float((guesses == test_kinds).mean())
            geomx.report(accuracy=accuracy)
            print(f"epoch {epoch}: loss {float(loss.mean().asscalar()):.4f}, accuracy {accuracy:.4f}", flush=True)
        if kv.global_rank == 0:  # a single worker of the job; the master worker may not train
            net.save_parameters(str(Path(os.environ.get("GEOMX_OUTPUT_DIR", "."), "model.params")))  # geomx fetch


if __name__ == "__main__":
    main()
