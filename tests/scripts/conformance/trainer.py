"""Gluon's usual loop, with data by rank. Argument: the optimizer."""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

BATCH, STEPS = 8, 6
NAME = sys.argv[1]
PARAMS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.001,
            "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, factor=0.5, base_lr=0.1)},
    "adam": {"learning_rate": 0.01, "wd": 0.001},
    "lamb": {"learning_rate": 0.01},
}  # fmt: skip

kv = mx.kv.create("dist_sync")
source = np.random.RandomState(1)
images = source.rand(BATCH * STEPS * kv.num_workers, 3, 8, 8).astype(np.float32)
labels = (images.mean(axis=(1, 2, 3)) > 0.5).astype(np.float32)
own = gluon.data.ArrayDataset(images[kv.rank :: kv.num_workers], labels[kv.rank :: kv.num_workers])
batches = gluon.data.DataLoader(own, BATCH)

mx.random.seed(5 + kv.rank)
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.Flatten(), gluon.nn.Dense(2))
net.initialize(mx.init.Xavier())
net.hybridize()
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
trainer = gluon.Trainer(net.collect_params(), NAME, PARAMS[NAME], kvstore=kv)
for data, label in batches:
    with autograd.record():
        loss = loss_of(net(data), label)
    loss.backward()
    trainer.step(BATCH * kv.num_workers)
np.savez(f"weights-{kv.rank}.npz", **{name: item.data().asnumpy() for name, item in net.collect_params().items()})
