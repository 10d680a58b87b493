"""fp16 weights with an fp32 master copy, and an fp16 key that is pulled into fp32."""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

STEPS = 8

kv = mx.kv.create("dist_sync")
weight = gluon.Parameter("weight", shape=(4, 3), dtype="float16", init=mx.init.Constant(10))
weight.initialize()
params = {"learning_rate": 1e-3, "momentum": 0.5, "multi_precision": True}
trainer = gluon.Trainer([weight], "sgd", params, kvstore=kv)
for step in range(STEPS):
    source = np.random.RandomState(10 * step + kv.rank)
    with autograd.record():
        loss = (weight.data() * mx.nd.array(source.randint(1, 9, (4, 3)) / 4, dtype="float16")).sum()
    loss.backward()
    trainer.step(1)
np.savez(f"weights-{kv.rank}.npz", weight=weight.data().asnumpy())
