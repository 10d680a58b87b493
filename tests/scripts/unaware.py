"""A script that does not handle masters that do not train: all workers run all of it, and the optimizer is set late.

Argument: seconds until the master sets the optimizer. The weight begins at 100, and each of three rounds subtracts 0.5
* (1 + 2 + ... + workers).
"""

import sys
import time

import mxnet as mx
from mxnet import gluon

kv = mx.kv.create("dist_sync")
weight = mx.nd.full((4,), 100)
kv.init(0, weight)
if kv.is_master_worker:
    time.sleep(float(sys.argv[1]))
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
data = gluon.data.DataLoader(gluon.data.SimpleDataset([[1.0]] * 3), 1, num_workers=1)
for _ in data:
    kv.push(0, mx.nd.full((4,), kv.global_rank + 1))
    kv.pull(0, out=weight)
mx.nd.waitall()
count = kv.num_all_workers
assert weight.asnumpy().tolist() == [100 - 3 * 0.5 * count * (count + 1) / 2] * 4, weight
kv.barrier("all")
print("done", kv.global_rank)
