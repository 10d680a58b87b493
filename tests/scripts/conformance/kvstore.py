"""Sums of all kinds without an optimizer. Argument: the store's type. Values are multiples of 1/8: exact sums."""

import sys

import mxnet as mx
import numpy as np

SHAPES = {3: (4, 4), 5: (100, 30), 7: (2, 3, 4), 9: (1100, 1000), 11: (1,)}
DTYPES = {20: "float16", 21: "float64", 22: "float32"}
ROUNDS = 3

kv = mx.kv.create(sys.argv[1])
saved = {}


def value(key, number, shape, dtype="float32"):
    source = np.random.RandomState(1000 * number + 10 * key + kv.rank)
    return mx.nd.array(source.randint(-80, 80, shape) / 8, dtype=dtype)


def keep(name, array):
    saved[name] = array.asnumpy()


out = mx.nd.zeros((5, 2))
kv.broadcast(1, mx.nd.full((5, 2), 7 + kv.rank), out=out)
keep("broadcast", out)

keys = list(SHAPES)
kv.init(keys, [value(key, 0, shape) for key, shape in SHAPES.items()])
for key, dtype in DTYPES.items():
    kv.init(key, mx.nd.zeros((6, 5), dtype=dtype))
outs = [mx.nd.zeros(shape) for shape in SHAPES.values()]
kv.pull(keys, out=outs)
for key, out in zip(keys, outs, strict=True):
    keep(f"initial {key}", out)

for number in range(1, ROUNDS + 1):
    for key, shape in SHAPES.items():
        kv.push(key, value(key, number, shape), priority=-key)
    for key, shape in SHAPES.items():
        out = mx.nd.zeros(shape)
        kv.pull(key, out=out, priority=-key)
        keep(f"sum {key} {number}", out)

kv.push(keys, [value(key, 10, shape) for key, shape in SHAPES.items()])
kv.pull(keys, out=outs)
for key, out in zip(keys, outs, strict=True):
    keep(f"list {key}", out)

kv.push(3, [value(3, 20 + device, (4, 4)) for device in range(3)])
taken = [mx.nd.zeros((4, 4)) for _ in range(2)]
kv.pull(3, out=taken)
keep("devices 0", taken[0])
keep("devices 1", taken[1])

out = mx.nd.zeros((100, 30))
kv.pushpull(5, value(5, 30, (100, 30)), out=out)
keep("pushpull", out)
given = value(7, 31, (2, 3, 4))
kv.pushpull(7, given)
keep("pushpull in place", given)

for key, dtype in DTYPES.items():
    out = mx.nd.zeros((6, 5), dtype=dtype)
    kv.push(key, value(key, 40, (6, 5), dtype))
    kv.pull(key, out=out)
    keep(f"of {dtype}", out)
kv.push(20, value(20, 41, (6, 5), "float16"))
out = mx.nd.zeros((6, 5))
kv.pull(20, out=out)
keep("of float16 into float32", out)

np.savez(f"weights-{kv.rank}.npz", **saved)
