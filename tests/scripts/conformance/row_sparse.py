"""Row-sparse pushes and pulls of named keys with an optimizer on the servers, then of keys initialised late.

Without an optimizer MXNet's own servers return rows in the wrong places.
"""

import mxnet as mx
import numpy as np

ROWS, WIDTH, ROUNDS = 40, 8, 4

kv = mx.kv.create("dist_sync")
saved = {}


def gradient(number):
    source = np.random.RandomState(100 * number + kv.rank)
    rows = np.unique(source.randint(0, ROWS, 6))
    values = source.randint(-80, 80, (len(rows), WIDTH)) / 8
    return mx.nd.sparse.row_sparse_array((values.astype(np.float32), rows), shape=(ROWS, WIDTH))


def pulled(key, rows):
    out = mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH))
    kv.row_sparse_pull(key, out=out, row_ids=mx.nd.array(rows, dtype="int64"))
    return out.asnumpy()


first = mx.nd.arange(ROWS * WIDTH).reshape((ROWS, WIDTH)).tostype("row_sparse")
kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, rescale_grad=0.25))
kv.init(["some", "all"], [first, first])
saved["initial"] = pulled("some", [3, 1, 3, 39])
for number in range(ROUNDS):
    kv.push("some", gradient(number))
    saved[f"some {number}"] = pulled("some", list(range(number, ROWS, 2)))
    kv.push(["all", "some"], [gradient(10 + number), gradient(20 + number)])
    saved[f"all {number}"] = pulled("all", list(range(ROWS)))
    saved[f"then some {number}"] = pulled("some", list(range(ROWS)))

# Each of these is initialised after rounds of the previous ones.
late = {}
for key in ("one", "two", "three", "four"):
    weight = late[key] = mx.nd.full((3, 5), 10 * len(late) + kv.rank)
    kv.init(key, weight)
    kv.pull(key, out=weight)
    for number, (other, weight) in enumerate(late.items()):
        kv.push(other, mx.nd.full((3, 5), 1 + kv.rank + number))
        kv.pull(other, out=weight)
        weight.wait_to_read()  # otherwise MXNet's own servers may add two gradients of one worker
saved |= {key: weight.asnumpy() for key, weight in late.items()}
np.savez(f"weights-{kv.rank}.npz", **saved)
