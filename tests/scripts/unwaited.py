"""A worker that trains without ever waiting; at the end it checks the weights, and that its memory grew by a small
multiple of the model's size, independent of the number of rounds.

The training thread has queued all rounds long before the first ones complete.
"""

import math
import resource

import mxnet as mx

SHAPES = [(512, 256, 4, 4), (2**20,)]
MODEL = 4 * sum(math.prod(shape) for shape in SHAPES)
ROUNDS, RATE = 40, 0.5


def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


kv = mx.kv.create("dist_sync")
weights = [mx.nd.full(shape, 100) for shape in SHAPES]
if kv.is_master_worker:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=RATE))
kv.init([0, 1], weights)
gradients = [mx.nd.zeros(shape) for shape in SHAPES]
mx.nd.waitall()
before = peak()
for _ in range(ROUNDS):
    for key, (gradient, weight) in enumerate(zip(gradients, weights, strict=True)):
        gradient[:] = weight * 0 + (1 + kv.global_rank)
        kv.push(key, gradient, priority=-key)
        kv.pull(key, out=weight, priority=-key)
mx.nd.waitall()
grown = (peak() - before) / MODEL
each = sum(range(1, kv.num_all_workers + 1))
for weight in weights:
    assert weight.min().asscalar() == weight.max().asscalar() == 100 - RATE * each * ROUNDS, weight
assert grown < ROUNDS / 3, f"memory grew by {grown:.1f} times the model's size"
