"""Every optimizer of MXNet on its own keys. Argument: where it runs, "server" or "worker"."""

import sys

import mxnet as mx
import numpy as np

CHOSEN = {
    "sgd": {"momentum": 0.9, "wd": 0.01},
    "nag": {"momentum": 0.9, "wd": 0.01},
    "adam": {"wd": 0.01},
    "adagrad": {"wd": 0.01},
    "rmsprop": {"centered": True, "wd": 0.01},
}
OTHERS = {
    "signum": {"momentum": 0.9}, "ftml": {}, "lars": {"momentum": 0.9}, "lbsgd": {"momentum": 0.9}, "lamb": {},
    "dcasgd": {}, "sgld": {}, "adadelta": {}, "ftrl": {}, "adamax": {}, "nadam": {}, "test": {},
}  # fmt: skip
PLACE = sys.argv[1]
SHAPE, ROUNDS = (16, 33), 4

kv = mx.kv.create("dist_sync")
mx.random.seed(3)


def gradient(number):
    source = np.random.RandomState(100 * number + kv.rank)
    return mx.nd.array(source.randn(*SHAPE) / 8)


def create(name, options):
    names = {key: f"weight{key}" for key in range(100)} if name in ("lars", "lbsgd") else {}
    params = {} if name == "test" else {"learning_rate": 0.05, **options}
    return mx.optimizer.create(name, rescale_grad=1 / kv.num_workers, param_idx2name=names, **params)


chosen = CHOSEN if PLACE == "server" else CHOSEN | OTHERS
saved = {}
for key, (name, options) in enumerate(chosen.items()):
    weight = mx.nd.array(np.random.RandomState(key).randn(*SHAPE))
    kv.init(key, weight)
    optimizer = create(name, options)
    if PLACE == "server":
        kv.set_optimizer(optimizer)
    update = mx.optimizer.get_updater(optimizer)
    for number in range(ROUNDS):
        kv.push(key, gradient(number))
        if PLACE == "server":
            kv.pull(key, out=weight)
            weight.wait_to_read()
        else:
            total = mx.nd.zeros(SHAPE)
            kv.pull(key, out=total)
            total.wait_to_read()  # otherwise MXNet's own store pushes the next gradient before this pull
            update(key, total, weight)
    saved[name] = weight.asnumpy()
np.savez(f"weights-{kv.rank}.npz", **saved)
