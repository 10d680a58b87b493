"""Keys that come while training goes on: each is initialised after rounds of those before."""

import mxnet as mx
import numpy as np

kv = mx.kv.create("dist_sync")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
weights = []
for key in range(4):
    weights.append(mx.nd.full((3, 5), 10 * key + kv.rank))
    kv.init(key, weights[key])
    kv.pull(key, out=weights[key])
    for other, weight in enumerate(weights):
        kv.push(other, mx.nd.full((3, 5), 1 + kv.rank + other))
        kv.pull(other, out=weight)
np.savez(f"weights-{kv.rank}.npz", *[weight.asnumpy() for weight in weights])
