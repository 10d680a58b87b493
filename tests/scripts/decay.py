"""mx.mod.Module or FeedForward (argument 1) with weight decay, which MXNet does not apply to biases; synthetic data."""

import sys

import mxnet as mx
import numpy as np

WAY, BATCH, EPOCHS, WORKERS = sys.argv[1], 8, 3, 2
PARAMS = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.2}
SHAPES = {"first_weight": (5, 6), "first_bias": (5,), "last_weight": (2, 5), "last_bias": (2,)}


def symbol():
    net = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=5, name="first")
    net = mx.sym.FullyConnected(mx.sym.Activation(net, act_type="relu"), num_hidden=2, name="last")
    return mx.sym.SoftmaxOutput(net, name="softmax")


def data(rank):
    source = np.random.RandomState(10 + max(rank, 0))
    images = source.randn(32, 6).astype(np.float32)
    return mx.io.NDArrayIter(images, (images.sum(axis=1) > 0).astype(np.float32), batch_size=BATCH)


def initial():
    source = np.random.RandomState(3)
    return {name: mx.nd.array(source.uniform(-0.5, 0.5, shape)) for name, shape in SHAPES.items()}


def save(path, parameters):
    np.savez(path, *[parameters[name].asnumpy() for name in sorted(parameters)])


def cluster():
    kv = mx.kv.create("dist_sync")
    if WAY == "module":
        module = mx.mod.Module(symbol())
        options = {"optimizer_params": PARAMS, "arg_params": initial()}
        module.fit(data(kv.global_rank), kvstore=kv, optimizer="sgd", num_epoch=EPOCHS, **options)
        save(f"params-{kv.global_rank}.npz", module.get_params()[0])
    else:
        model = mx.model.FeedForward(symbol(), num_epoch=EPOCHS, optimizer="sgd", arg_params=initial(), **PARAMS)
        model.fit(data(kv.global_rank), kvstore=kv)
        save(f"params-{kv.global_rank}.npz", model.arg_params)


def alone(ranks):
    module, weights = mx.mod.Module(symbol()), initial()
    module.bind(data(0).provide_data, data(0).provide_label)
    names = dict(enumerate(SHAPES))
    params = {**PARAMS, "rescale_grad": 1 / (BATCH * WORKERS), "param_idx2name": names}
    updater = mx.optimizer.get_updater(mx.optimizer.create("sgd", **params))
    for _ in range(EPOCHS):
        for batches in zip(*(data(rank) for rank in range(ranks)), strict=True):
            sums = {name: mx.nd.zeros(shape) for name, shape in SHAPES.items()}
            for batch in batches:
                module.set_params(weights, {}, allow_missing=True, force_init=True)
                module.forward_backward(batch)
                grads = dict(zip(module._exec_group.param_names, module._exec_group.grad_arrays, strict=True))
                sums = {name: total + grads[name][0] for name, total in sums.items()}
            for index, name in names.items():
                updater(index, sums[name], weights[name])
    save("reference.npz", weights)


alone(int(sys.argv[2])) if len(sys.argv) > 2 else cluster()
