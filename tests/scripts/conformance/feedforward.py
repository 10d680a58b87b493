"""FeedForward.fit with the store given by name, as in old scripts."""

import mxnet as mx
import numpy as np

BATCH, EPOCHS = 8, 2

kv = mx.kv.create("dist_sync")
rank, count = kv.rank, kv.num_workers
source = np.random.RandomState(2)
points = source.rand(48, 6).astype(np.float32)
labels = (points.sum(axis=1) > 3).astype(np.float32)
data = mx.io.NDArrayIter(points[rank::count], labels[rank::count], batch_size=BATCH)

net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=12)
net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=2)
mx.random.seed(5 + rank)
model = mx.model.FeedForward(
    mx.sym.SoftmaxOutput(net, name="softmax"), num_epoch=EPOCHS, learning_rate=0.1, momentum=0.9,
    initializer=mx.init.Xavier(),
)  # fmt: skip
model.fit(data, kvstore=kv)
np.savez(f"weights-{rank}.npz", **{name: item.asnumpy() for name, item in model.arg_params.items()})
