"""One of four workers in two parties that request GeoMX's sparse compression; arguments: its type, and the bound on the
size of tensors, twice the size of a slice. The sums of a round are compared with numpy.
"""

import sys

import mxnet as mx
import numpy as np

KIND, BOUND = sys.argv[1], int(sys.argv[2])
SIZES = {"small": BOUND - 1, "large": BOUND}


def rounded(array):
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2048) / 2048, exponent).astype(np.float32)


def given(rank, key):
    return np.random.RandomState(10 * rank + len(key)).uniform(-1, 1, SIZES[key]).astype(np.float32)


def sent(array, key):
    if key == "small":
        return rounded(array) if KIND == "mpq" else array
    found = np.zeros_like(array)
    for piece, out in zip(np.split(array, 2), np.split(found, 2), strict=True):
        chosen = np.argsort(-np.abs(piece), kind="stable")[: int(np.ceil(len(piece) * 0.1))]
        out[chosen] = rounded(piece[chosen])
    return found


def main():
    kv = mx.kv.create("dist_sync")
    kv.set_gradient_compression({"type": KIND, "threshold": 0.1, "pull": "union"})
    for key, size in SIZES.items():
        kv.init(key, mx.nd.zeros(size))
    if kv.global_rank < 0:
        return
    for key, size in SIZES.items():
        kv.push(key, mx.nd.array(given(kv.global_rank, key)))
        out = mx.nd.zeros(size)
        kv.pull(key, out=out)
        total = sum(sent(given(low, key) + given(low + 1, key), key) for low in (0, 2))
        wanted = rounded(total) if key == "large" or KIND == "mpq" else total
        assert np.array_equal(out.asnumpy(), wanted), key


main()
