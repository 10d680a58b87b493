"""A worker whose optimizer has momentum. Arguments: who runs it ("store", "server" or "worker": a gluon.Trainer's, or
"own": the workers, as the servers cannot), the momentum, and the codec of set_gradient_compression, or "".
"""

import sys

import mxnet as mx
from mxnet import autograd, gluon

PLACE, MOMENTUM, CODEC = sys.argv[1], float(sys.argv[2]), sys.argv[3]


class Own(mx.optimizer.SGD):
    pass


kv = mx.kv.create("dist_sync")
if PLACE in ("store", "own"):
    kind = Own if PLACE == "own" else mx.optimizer.SGD
    kv.set_optimizer(kind(learning_rate=0.1, momentum=MOMENTUM))
if CODEC:
    kv.set_gradient_compression({"type": CODEC, "threshold": 0.5})
if PLACE in ("store", "own"):
    kv.init("w", mx.nd.ones(4))
    kv.push("w", mx.nd.ones(4))
    kv.pull("w", out=mx.nd.ones(4))
else:
    net = gluon.nn.Dense(1, in_units=3)
    net.initialize()
    params = {"learning_rate": 0.1, "momentum": MOMENTUM}
    trainer = gluon.Trainer(net.collect_params(), "sgd", params, kvstore=kv, update_on_kvstore=PLACE == "server")
    with autograd.record():
        loss = net(mx.nd.ones((2, 3))).sum()
    loss.backward()
    trainer.step(2)
mx.nd.waitall()
