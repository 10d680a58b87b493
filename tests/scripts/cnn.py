"""A typical training script on synthetic data, with the optimizer on the servers or on the workers.

Argument 1: "server" or "worker". Writes its final parameters to params-RANK.npz. With RANKS in argument 2 it is the
reference instead: one process without a cluster, which takes the same steps from the gradients of all RANKS.
"""

import random
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

STEPS, BATCH = 6, 8
LOSS = gluon.loss.SoftmaxCrossEntropyLoss()


def build():
    random.seed(3)
    mx.random.seed(3)
    np.random.seed(3)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.MaxPool2D(2), gluon.nn.Dense(16, activation="relu"))
    net.add(gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    net(mx.nd.zeros((1, 1, 12, 12)))
    return net, [parameter for parameter in net.collect_params().values() if parameter.grad_req != "null"]


def batch(rank, step):
    source = np.random.RandomState(100 * step + rank)
    labels = source.randint(0, 4, BATCH)
    images = source.randn(BATCH, 1, 12, 12) + labels[:, None, None, None]
    return mx.nd.array(images), mx.nd.array(labels)


def gradients(net, params, rank, step):
    images, labels = batch(rank, step)
    with autograd.record():
        loss = LOSS(net(images), labels)
    loss.backward()
    return [parameter.grad() for parameter in params]


def optimizer():
    return mx.optimizer.SGD(learning_rate=0.05, momentum=0.9)


def cluster(place):
    kv = mx.kv.create("dist_sync")
    net, params = build()
    if place == "server" and kv.is_master_worker:
        kv.set_optimizer(optimizer())
    for index, parameter in enumerate(params):
        kv.init(index, parameter.data())
        if kv.is_master_worker:
            continue
        kv.pull(index, parameter.data(), priority=-index)
    mx.nd.waitall()
    if kv.is_master_worker:
        return
    trainer = gluon.Trainer(params, optimizer(), kvstore=None)
    for step in range(STEPS):
        for index, grad in enumerate(gradients(net, params, kv.global_rank, step)):
            target = params[index].data() if place == "server" else grad
            kv.push(index, grad / BATCH, priority=-index)
            kv.pull(index, target, priority=-index)
        if place == "worker":
            trainer.step(1)
    mx.nd.waitall()
    save(f"params-{kv.global_rank}.npz", params)


def alone(ranks):
    net, params = build()
    updater = mx.optimizer.get_updater(optimizer())
    for step in range(STEPS):
        sums = [parameter.grad() * 0 for parameter in params]
        for rank in range(ranks):
            for index, grad in enumerate(gradients(net, params, rank, step)):
                sums[index] += grad / BATCH
        for index, parameter in enumerate(params):
            updater(index, sums[index], parameter.data())
    save("reference.npz", params)


def save(path, params):
    np.savez(path, *[parameter.data().asnumpy() for parameter in params])


if len(sys.argv) > 2:
    alone(int(sys.argv[2]))
else:
    cluster(sys.argv[1])
