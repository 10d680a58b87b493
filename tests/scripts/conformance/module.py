"""Module.fit as in MXNet's examples: weight decay, momentum, a schedule, data by rank."""

import mxnet as mx
import numpy as np

BATCH, EPOCHS = 8, 2

kv = mx.kv.create("dist_sync")
source = np.random.RandomState(1)
images = source.rand(64, 1, 8, 8).astype(np.float32)
labels = (images.mean(axis=(1, 2, 3)) > 0.5).astype(np.float32)
mine = slice(kv.rank, None, kv.num_workers)
data = mx.io.NDArrayIter(images[mine], labels[mine], batch_size=BATCH)

net = mx.sym.Variable("data")
net = mx.sym.Activation(mx.sym.Convolution(net, num_filter=8, kernel=(3, 3)), act_type="relu")
net = mx.sym.FullyConnected(mx.sym.Flatten(net), num_hidden=16)
net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.Activation(net, act_type="tanh"), num_hidden=2), name="softmax")

mx.random.seed(5 + kv.rank)
steps = mx.lr_scheduler.MultiFactorScheduler(step=[3, 6], factor=0.5, base_lr=0.1)
module = mx.mod.Module(net)
module.fit(
    data, kvstore=kv, num_epoch=EPOCHS, initializer=mx.init.Xavier(), optimizer="sgd",
    optimizer_params={"learning_rate": 0.1, "momentum": 0.9, "wd": 0.001, "lr_scheduler": steps},
)  # fmt: skip
parameters, _ = module.get_params()
np.savez(f"weights-{kv.rank}.npz", **{name: item.asnumpy() for name, item in parameters.items()})
