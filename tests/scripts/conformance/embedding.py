"""A sparse embedding in Gluon's loop, with momentum, which changes only the rows of a push."""

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

WORDS, WIDTH, BATCH, STEPS = 50, 4, 6, 5

kv = mx.kv.create("dist_sync")
params = {"learning_rate": 0.1, "momentum": 0.9, "rescale_grad": 1 / (BATCH * kv.num_workers)}
mx.random.seed(5)


class Net(gluon.Block):
    """An embedding and a dense layer."""

    def __init__(self):
        super().__init__(prefix="net_")
        with self.name_scope():
            self.embedding = gluon.contrib.nn.SparseEmbedding(WORDS, WIDTH)
            self.dense = gluon.nn.Dense(1, in_units=2 * WIDTH)

    def forward(self, words):
        return self.dense(self.embedding(words).reshape((len(words), -1)))


net = Net()
net.initialize(mx.init.Normal(0.5))
trainer = gluon.Trainer(net.collect_params(), "sgd", params, kvstore=kv)
for step in range(STEPS):
    source = np.random.RandomState(100 * step + kv.rank)
    words = mx.nd.array(source.randint(0, WORDS, (BATCH, 2)))
    with autograd.record():
        loss = (net(words) - mx.nd.array(source.randn(BATCH, 1))) ** 2
    loss.backward()
    trainer.step(1)  # pulls rows, so the servers need the optimizer before the first step
rows = net.embedding.weight.row_sparse_data(mx.nd.arange(WORDS, dtype="int64")).asnumpy()
dense = {name: item.data().asnumpy() for name, item in net.dense.collect_params().items()}
np.savez(f"weights-{kv.rank}.npz", embedding=rows, **dense)
