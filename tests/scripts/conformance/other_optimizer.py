"""An optimizer of MXNet that our servers do not have. Argument: its name."""

import sys

import mxnet as mx
import numpy as np

kv = mx.kv.create("dist_sync")
name = sys.argv[1]
kv.set_optimizer(mx.optimizer.create(name, rescale_grad=0.5, **({} if name == "test" else {"learning_rate": 0.05})))
weights = [mx.nd.array(np.random.RandomState(key).randn(7, 5)) for key in range(3)]
for key, weight in enumerate(weights):
    kv.init(key, weight)
for number in range(4):
    for key, weight in enumerate(weights):
        source = np.random.RandomState(100 * number + 10 * key + kv.rank)
        kv.push(key, mx.nd.array(source.randn(7, 5)))
        kv.pull(key, out=weight)
        weight.wait_to_read()  # otherwise MXNet's own servers may add two gradients of one worker
np.savez(f"weights-{kv.rank}.npz", *[weight.asnumpy() for weight in weights])
