"""Gluon's Trainer updating on the workers: states are saved, changed by more steps, and loaded by another trainer."""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

kv = mx.kv.create("dist_sync")
mx.random.seed(5)
net = gluon.nn.Dense(3, in_units=4, prefix="net_")
net.initialize(mx.init.Xavier())
trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.05}, kvstore=kv, update_on_kvstore=False)


def steps(numbers):
    for number in numbers:
        source = np.random.RandomState(100 * number + kv.rank)
        with autograd.record():
            loss = (net(mx.nd.array(source.randn(6, 4))) ** 2).sum()
        loss.backward()
        trainer.step(6 * kv.num_workers)


trainer._init_kvstore()
trainer._init_params()
mx.nd.waitall()  # otherwise a worker of MXNet's own store may get the first gradients instead of its first weights
steps(range(3))
trainer.save_states(f"states-{kv.rank}")
net.save_parameters(f"net-{kv.rank}.params")
steps(range(10, 13))
net.load_parameters(f"net-{kv.rank}.params")
trainer.load_states(f"states-{kv.rank}")
steps(range(3, 6))
np.savez(f"weights-{kv.rank}.npz", **{name: item.data().asnumpy() for name, item in net.collect_params().items()})
