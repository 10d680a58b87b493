"""A script for MXNet's own dist_sync without knowledge of parties: it uses only rank and num_workers.

Arguments: an output folder, and "kv" or "trainer". Every worker writes the numbers of its samples to RANK.txt; rank 0
alone writes the weights to weights.npy, which must not exist yet.
"""

import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

FOLDER, WAY = Path(sys.argv[1]), sys.argv[2]
SAMPLES, FEATURES, BATCH, EPOCHS = 96, 5, 4, 2
OPTIMIZER = {"learning_rate": 0.1, "momentum": 0.9}


def main():
    kv = mx.kv.create("dist_sync")
    draw = np.random.RandomState(3)
    data = draw.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
    label = data @ np.arange(FEATURES, dtype=np.float32).reshape(-1, 1)
    mine = np.arange(SAMPLES)[kv.rank :: kv.num_workers]
    (FOLDER / f"{kv.rank}.txt").write_text(" ".join(map(str, mine)))
    net = gluon.nn.Dense(1, in_units=FEATURES, use_bias=False)
    # The values of rank 0 are used, but a Trainer gets them only after the first gradient.
    net.initialize(mx.init.Constant(kv.rank + 1 if WAY == "kv" else 1))
    (by_kvstore if WAY == "kv" else by_trainer)(kv, net, mx.nd.array(data[mine]), mx.nd.array(label[mine]))
    if kv.rank == 0:
        with (FOLDER / "weights.npy").open("xb") as file:
            np.save(file, net.weight.data().asnumpy())


def batches(data, label):
    for _ in range(EPOCHS):
        for first in range(0, len(data), BATCH):
            yield data[first : first + BATCH], label[first : first + BATCH]


def gradient(net, x, y):
    with autograd.record():
        loss = gluon.loss.L2Loss()(net(x), y)
    loss.backward()


def by_kvstore(kv, net, data, label):
    if kv.rank == 0:
        kv.set_optimizer(mx.optimizer.SGD(rescale_grad=1 / (BATCH * kv.num_workers), **OPTIMIZER))
    kv.init(0, net.weight.data())
    kv.pull(0, out=net.weight.data())
    for x, y in batches(data, label):
        gradient(net, x, y)
        kv.push(0, net.weight.grad())
        kv.pull(0, out=net.weight.data())
    kv._barrier()


def by_trainer(kv, net, data, label):
    trainer = gluon.Trainer(net.collect_params(), "sgd", dict(OPTIMIZER), kvstore=kv)
    for x, y in batches(data, label):
        gradient(net, x, y)
        trainer.step(BATCH * kv.num_workers)


main()
