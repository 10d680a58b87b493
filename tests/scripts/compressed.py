"""One of four workers that request gradient compression; argument: "workers" or "master", who requests it. Sums and
updates are compared with numpy, with 11 significant bits between parties and global servers.
"""

import sys

import mxnet as mx
import numpy as np
from mxnet.base import MXNetError

ROUNDS, SIZE = 3, 50


def rounded(array):
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2048) / 2048, exponent).astype(np.float32)


def given(rank, number):
    return np.random.RandomState(10 * number + rank).uniform(1, 3, SIZE).astype(np.float32)


def main():
    kv = mx.kv.create("dist_sync")
    if sys.argv[1] == "workers" or kv.is_master_worker:
        kv.set_gradient_compression({"type": "fp16"})
        kv.set_gradient_compression({"type": "fp16"})
        for other in ({"type": "bf16"}, {"type": "none"}):
            try:
                kv.set_gradient_compression(other)
            except MXNetError as error:
                assert "where fp16 is in use" in str(error), error
            else:
                raise AssertionError("not refused")
    if kv.is_master_worker:
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
    weight = np.linspace(1, 2, SIZE, dtype=np.float32)
    kv.init("w", mx.nd.array(weight))
    if kv.global_rank < 0:
        return
    out = mx.nd.zeros(SIZE)
    kv.pull("w", out=out)
    assert np.array_equal(out.asnumpy(), weight)
    parties = [[0], [1], [2], [3]] if kv.num_workers == kv.num_all_workers else [[0, 1], [2, 3]]
    for number in range(ROUNDS):
        kv.push("w", mx.nd.array(given(kv.global_rank, number)))
        kv.pull("w", out=out)
        total = 0
        for party in parties:
            total = total + rounded(sum(given(rank, number) for rank in party))
        weight = weight - np.float32(0.5) * total
        assert np.array_equal(out.asnumpy(), rounded(weight)), number


main()
