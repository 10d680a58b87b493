"""gluon.Trainer with an fp16 weight and multi_precision, against numpy in fp32. Argument: where to update.

Each step is below the resolution of fp16 at the weight, so only fp32 weights change.
"""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

RATE, STEPS, START = 2e-4, 20, 10.0


def factors(rank, step):
    source = np.random.RandomState(10 * step + rank)
    return source.uniform(0.5, 1.5, (4, 3)).astype(np.float16)


def main():
    kv = mx.kv.create("dist_sync")
    weight = gluon.Parameter("weight", shape=(4, 3), dtype="float16", init=mx.init.Constant(START))
    weight.initialize()
    params = {"learning_rate": RATE, "momentum": 0.5, "multi_precision": True}
    trainer = gluon.Trainer([weight], "sgd", params, kvstore=kv, update_on_kvstore=sys.argv[1] == "server")
    exact, momentum = np.full((4, 3), START, np.float32), np.zeros((4, 3), np.float32)
    for step in range(STEPS):
        with autograd.record():
            loss = (weight.data() * mx.nd.array(factors(kv.global_rank % 4, step), dtype="float16")).sum()
        loss.backward()
        trainer.step(1)
        total = sum(factors(rank, step).astype(np.float32) for rank in range(3))
        if sys.argv[1] == "worker":
            total = total.astype(np.float16).astype(np.float32)
        momentum = np.float32(0.5) * momentum - np.float32(RATE) * total
        exact = exact + momentum
        np.testing.assert_allclose(weight.data().asnumpy(), exact.astype(np.float16), rtol=1e-3)
    assert (exact < START - 0.015).all() and (weight.data().asnumpy() < START - 0.01).all()
    assert weight.data().dtype == np.float16


main()
