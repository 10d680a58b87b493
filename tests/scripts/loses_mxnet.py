"""Constant gradients, of the worker's rank plus 1, for an optimizer on the servers. Rank 1 dies in step 4."""

import os
import signal

import mxnet as mx

STEPS, AT, SIZE = 10, 4, 400_000
kv = mx.kv.create("dist_sync")
kv.init("w", mx.nd.zeros((SIZE,)))
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, rescale_grad=1.0 / kv.num_workers))
out = mx.nd.zeros((SIZE,))
for step in range(STEPS):
    if step == AT and kv.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    kv.push("w", mx.nd.ones((SIZE,)) * (kv.rank + 1))
    kv.pull("w", out=out)
    out.wait_to_read()
print("weights", out.min().asscalar(), out.max().asscalar(), flush=True)
