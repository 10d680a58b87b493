"""Gluon's Estimator over the store, with data by rank."""

import logging
import warnings

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.gluon.contrib.estimator import Estimator

warnings.simplefilter("ignore")
BATCH, EPOCHS = 8, 2

kv = mx.kv.create("dist_sync")
source = np.random.RandomState(3)
points = source.rand(32 * kv.num_workers, 6).astype(np.float32)
labels = (points.sum(axis=1) > 3).astype(np.float32)
own = gluon.data.ArrayDataset(points[kv.rank :: kv.num_workers], labels[kv.rank :: kv.num_workers])

mx.random.seed(5 + kv.rank)
net = gluon.nn.HybridSequential(prefix="net_")
with net.name_scope():
    net.add(gluon.nn.Dense(12, activation="relu"), gluon.nn.Dense(2))
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=kv)
estimator = Estimator(net, gluon.loss.SoftmaxCrossEntropyLoss(), mx.metric.Accuracy(), trainer=trainer)
estimator.logger.setLevel(logging.ERROR)
estimator.fit(gluon.data.DataLoader(own, BATCH), epochs=EPOCHS)
np.savez(f"weights-{kv.rank}.npz", **{name: item.data().asnumpy() for name, item in net.collect_params().items()})
