"""Gradient compression of 2 bits: sums of the decoded values, and an optimizer on the servers; keys of several sizes.
"""

import mxnet as mx
import numpy as np

kv = mx.kv.create("dist_sync")
kv.set_gradient_compression({"type": "2bit", "threshold": 0.5})
source = np.random.RandomState(kv.rank)
shapes = [(3,), (40, 30), (70, 100)]
saved = []
for key, shape in enumerate(shapes):
    kv.init(key, mx.nd.zeros(shape))
for optimizer in (False, True):
    if optimizer:
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.5))
        kv._barrier()
    for _ in range(4):
        for key, shape in enumerate(shapes):
            out = mx.nd.zeros(shape)
            kv.push(key, mx.nd.array(source.normal(0, 0.4, shape)))
            kv.pull(key, out=out)
            saved.append(out.asnumpy())
np.savez(f"weights-{kv.rank}.npz", *saved)
