"""mx.mod.Module over the store, on synthetic data, as in old scripts; all workers set the optimizer.

Writes its final parameters to params-RANK.npz.
"""

import mxnet as mx
import numpy as np

kv = mx.kv.create("dist_sync")
source = np.random.RandomState(10 + kv.global_rank)
images = source.randn(32, 6).astype(np.float32)
labels = (images.sum(axis=1) > 0).astype(np.float32)
data = mx.io.NDArrayIter(images, labels, batch_size=8)
net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2)
module = mx.mod.Module(mx.sym.SoftmaxOutput(net, name="softmax"))
module.fit(data, kvstore=kv, optimizer="sgd", optimizer_params={"learning_rate": 0.1}, num_epoch=3)
parameters, _ = module.get_params()
np.savez(f"params-{kv.global_rank}.npz", *[parameters[name].asnumpy() for name in sorted(parameters)])
