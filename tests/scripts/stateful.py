"""Training that saves its state; argument 1: a gluon network with pushes and pulls by hand, or a Module.

Prints a digest of the weights, and what else has to be as in a job without kills.
"""

import hashlib
import json
import sys
import time

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import geomx_cli.mxnet as geomx

KIND, EPOCHS, PAUSE, BATCH = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), 8
kv = geomx.init("dist_sync")
rank, workers = geomx.global_rank(), geomx.num_all_workers()
mx.random.seed(7)
np.random.seed(11 + rank)
numbers = np.random.default_rng(3)
images = numbers.normal(size=(320, 1, 6, 6)).astype(np.float32)[rank::workers]
labels = numbers.integers(0, 4, 320).astype(np.float32)[rank::workers]

def after_step():
    time.sleep(PAUSE)
    geomx.report(samples=BATCH)


def train_network():
    """Each pull comes after the batch that follows its push."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(4, 3, in_channels=1), gluon.nn.BatchNorm(in_channels=4), gluon.nn.Flatten())
    net.add(gluon.nn.Dropout(0.3), gluon.nn.Dense(4, in_units=64))
    net.initialize(mx.init.Xavier())
    parameters = net.collect_params().values()
    trained = [parameter for parameter in parameters if parameter.grad_req != "null"]
    keys, weights = list(range(len(trained))), [parameter.data() for parameter in trained]
    schedule = mx.lr_scheduler.FactorScheduler(5, 0.9, base_lr=0.01)
    optimizer = mx.optimizer.Adam(learning_rate=0.01, lr_scheduler=schedule, rescale_grad=1 / (BATCH * workers))
    kv.set_optimizer(optimizer)
    kv.init(keys, weights)
    data = gluon.data.DataLoader(gluon.data.ArrayDataset(images, labels, np.arange(len(labels))), BATCH, shuffle=True)
    state = geomx.state(net=net, seen=0)
    for _ in state.epochs(EPOCHS):
        shift = np.random.rand()  # the same for the whole epoch
        for batch, wanted, indices in state.batches(data):
            kv.pull(keys, out=weights)
            with autograd.record():
                loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(batch + 0.1 * shift), wanted)
            loss.backward()
            for key, parameter in zip(keys, trained, strict=True):
                kv.push(key, parameter.grad(), priority=-key)
            state.seen = (state.seen * 31 + int((indices.asnumpy() * np.arange(1, BATCH + 1)).sum())) % 1_000_003
            after_step()
    kv.pull(keys, out=weights)
    return [parameter.data() for parameter in parameters], optimizer, [state.seen], state.resumed


def train_module():
    """The learning rate changes after each batch, by a number that is drawn."""
    net = mx.sym.Dropout(mx.sym.BatchNorm(mx.sym.Flatten(mx.sym.Variable("data"))), p=0.3)
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(net, num_hidden=4), name="softmax")
    module = mx.mod.Module(net)
    optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, rescale_grad=1 / (BATCH * workers))
    data = mx.io.NDArrayIter(images, labels, BATCH, shuffle=True)

    def after_batch(_):
        optimizer.lr *= 1 - 0.01 * np.random.rand()
        after_step()

    geomx.fit(module, data, kvstore=kv, optimizer=optimizer, num_epoch=EPOCHS, batch_end_callback=after_batch)
    return [array for named in module.get_params() for _, array in sorted(named.items())], optimizer, [], False


arrays, optimizer, seen, resumed = train_network() if KIND == "network" else train_module()
digest = hashlib.sha256(b"".join(array.asnumpy().tobytes() for array in arrays)).hexdigest()
found = [rank, digest, optimizer.learning_rate, optimizer.num_update, np.random.rand(), *seen]
print("FOUND", json.dumps(found), "resumed" if resumed else "", flush=True)
