"""gluon.Trainer over the store, on synthetic data. Arguments: whether to update on the store, and which optimizer.

The learning rate changes halfway. With RANKS in argument 3 it is the reference: one process without a cluster.
"""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

STEPS, BATCH = 6, 8
PLACE, NAME = sys.argv[1:3]


def build():
    mx.random.seed(5)
    np.random.seed(5)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(16, activation="relu"), gluon.nn.Dense(1))
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def schedule():
    return mx.lr_scheduler.FactorScheduler(2, factor=0.5, base_lr=0.02) if NAME == "scheduled" else None


def backward(net, rank, step):
    source = np.random.RandomState(100 * step + rank + 1)
    images = mx.nd.array(source.randn(BATCH, 6))
    with autograd.record():
        loss = (net(images) - images.sum(axis=1, keepdims=True)) ** 2
    loss.backward()
    return float(loss.mean().asscalar())


def cluster():
    kv = mx.kv.create("dist_sync")
    net = build()
    chosen = "sgd" if NAME == "scheduled" else NAME
    params = {"learning_rate": 0.02, **({"lr_scheduler": schedule()} if NAME == "scheduled" else {})}
    trainer = gluon.Trainer(
        net.collect_params(), chosen, params, kvstore="dist_sync", update_on_kvstore=PLACE == "server"
    )
    for step in range(STEPS):
        if step == STEPS // 2 and NAME != "scheduled":
            trainer.set_learning_rate(0.005)
        backward(net, kv.global_rank, step)
        trainer.step(BATCH * kv.num_all_workers)
    save(f"params-{kv.global_rank}.npz", net)


def alone(ranks):
    net = build()
    optimizer = mx.optimizer.create("sgd" if NAME == "scheduled" else NAME, learning_rate=0.02)
    optimizer.rescale_grad = 1 / (BATCH * ranks)
    if NAME == "scheduled":
        optimizer.lr_scheduler = schedule()
    updater = mx.optimizer.get_updater(optimizer)
    for step in range(STEPS):
        if step == STEPS // 2 and NAME != "scheduled":
            optimizer.set_learning_rate(0.005)
        sums = None
        for rank in range(ranks):
            backward(net, rank, step)
            grads = [parameter.grad().copy() for parameter in net.collect_params().values()]
            sums = grads if sums is None else [one + other for one, other in zip(sums, grads, strict=True)]
        for index, parameter in enumerate(net.collect_params().values()):
            updater(index, sums[index], parameter.data())
    save("reference.npz", net)


def save(path, net):
    np.savez(path, *[parameter.data().asnumpy() for parameter in net.collect_params().values()])


if len(sys.argv) > 3:
    alone(int(sys.argv[3]))
else:
    cluster()
