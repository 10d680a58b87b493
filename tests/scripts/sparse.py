"""A worker of two parties (and the master) that checks row-sparse arrays against dense ones, and trains with them.

Argument: "rules", a type of store (count bytes), "module" (Module trains a row-sparse weight), or what gluon.Trainer
trains: "gradient" (a dense weight with row-sparse gradients) or "weight" (both row-sparse). With RANKS in argument 2 it
is the reference instead: one process with MXNet's own optimizer.
"""

import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.base import MXNetError

ROWS, WIDTH, STEPS = 12, 3, 4
SETTINGS = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
PARAMS = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, "rescale_grad": 0.5}


def refused(words, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except MXNetError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def sparse(dense):
    return mx.nd.array(dense).tostype("row_sparse")


def empty(dtype="float32"):
    return mx.nd.sparse.zeros("row_sparse", (ROWS, WIDTH), dtype=dtype)


def numbers(*rows):
    return mx.nd.array(rows, dtype="int64")


def gradient(rank, step):
    """A gradient with a few nonzero rows."""
    source = np.random.RandomState(10 * step + rank)
    found = np.zeros((ROWS, WIDTH), np.float32)
    found[source.randint(0, ROWS, 3)] = source.randn(3, WIDTH)
    return found


def only(weight, rows):
    found = np.zeros_like(weight)
    found[rows] = weight[rows]
    return found


def check_pulls(kv, key, weight):
    """Pull repeated, unsorted, no and float row numbers; one array or several; some or all of the rows."""
    one, two = empty(), empty()
    kv.row_sparse_pull(key, out=one, row_ids=numbers(7, 1, 7))
    assert np.array_equal(one.asnumpy(), only(weight, [1, 7])) and one.stype == "row_sparse"
    kv.row_sparse_pull(key, out=one, row_ids=mx.nd.array([0]))
    assert np.array_equal(one.asnumpy(), only(weight, [0])) and one.indices.asnumpy().tolist() == [0]
    kv.row_sparse_pull(key, out=[one, two], row_ids=[numbers(2), numbers(3, 4)])
    assert np.array_equal(one.asnumpy(), only(weight, [2])) and np.array_equal(two.asnumpy(), only(weight, [3, 4]))
    kv.row_sparse_pull(key, out=[one, two], row_ids=numbers(5))
    assert np.array_equal(one.asnumpy(), only(weight, [5])) and np.array_equal(two.asnumpy(), only(weight, [5]))
    kv.row_sparse_pull([key], out=[one], row_ids=[numbers(6)])
    assert np.array_equal(one.asnumpy(), only(weight, [6]))
    kv.row_sparse_pull(key, out=one, row_ids=numbers(*range(ROWS)))
    assert np.array_equal(one.asnumpy(), weight)
    kv.row_sparse_pull([key, key], out=[one, two], row_ids=[numbers(8), numbers(9)])
    assert np.array_equal(one.asnumpy(), only(weight, [8])) and np.array_equal(two.asnumpy(), only(weight, [9]))
    kv.pull(key, out=one)
    assert np.array_equal(one.asnumpy(), only(weight, [8])), "ignored"
    kv.pull(key, out=one, ignore_sparse=False)
    assert np.array_equal(one.asnumpy(), weight)


def check_refusals(kv):
    refused("give row-sparse", kv.row_sparse_pull, "sparse", out=mx.nd.zeros((ROWS, WIDTH)), row_ids=numbers(0))
    refused("2 of row numbers", kv.row_sparse_pull, "sparse", out=empty(), row_ids=[numbers(0), numbers(1)])
    refused("numbers of rows", kv.row_sparse_pull, "sparse", out=empty())
    refused("rows 0 to 12", kv.row_sparse_pull, "sparse", out=empty(), row_ids=numbers(0, ROWS))
    refused("elements", kv.row_sparse_pull, "sparse", out=mx.nd.sparse.zeros("row_sparse", (2, 2)), row_ids=numbers(0))
    refused("csr", kv.push, "sparse", mx.nd.ones((ROWS, WIDTH)).tostype("csr"))
    refused("not been initialised", kv.row_sparse_pull, "x", out=empty(), row_ids=numbers(0))


def rules():
    """Row-sparse "sparse" and dense "dense" get the same gradients, on several devices, and stay equal."""
    kv = mx.kv.create("dist_sync")
    if kv.is_master_worker:
        kv.set_optimizer(mx.optimizer.SGD(lazy_update=False, **PARAMS))
    weight = np.random.RandomState(1).randn(ROWS, WIDTH).astype(np.float32)
    kv.init(["sparse", "dense", "half"], [sparse(weight), mx.nd.array(weight), sparse(weight).astype("float16")])
    if kv.global_rank < 0:
        return
    rank, out = kv.global_rank, mx.nd.zeros((ROWS, WIDTH))
    check_pulls(kv, "sparse", weight)
    for step in range(STEPS):
        one, two = gradient(rank, step), gradient(rank + 4, step)
        pushed = [sparse(one), sparse(two if step else two * 0)]
        kv.push("sparse", pushed)
        kv.pushpull("dense", mx.nd.array(one + (two if step else two * 0)), out=out)
        assert np.array_equal(pushed[0].asnumpy(), one)
    check_pulls(kv, "sparse", out.asnumpy())
    check_refusals(kv)
    both = mx.nd.zeros((ROWS, WIDTH))
    kv.push(["sparse", "dense"], [sparse(one), sparse(one)])
    kv.pull(["sparse", "dense"], out=[both, out])
    assert np.array_equal(both.asnumpy(), out.asnumpy())
    half = empty("float16")
    kv.push("half", sparse(one).astype("float16"))
    kv.row_sparse_pull("half", out=half, row_ids=numbers(3))
    assert half.asnumpy()[3].any() and not half.asnumpy()[4].any() and half.dtype == np.float16
    kv.barrier("all")


def count_bytes(kind):
    """Ten pushes and pulls of one row send almost none of the key's bytes; the rows are those of SGD."""
    rows, width = 100_000, 64
    kv = mx.kv.create(kind)
    if kv.is_master_worker:
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5, momentum=0.5))
    kv.init("table", mx.nd.zeros((rows, width)))
    if kv.global_rank < 0:
        return
    out = mx.nd.sparse.zeros("row_sparse", (rows, width))
    kv.row_sparse_pull("table", out=out, row_ids=numbers(1))
    traffic = kv._store._client.traffic
    before = sum(traffic().lan) + sum(traffic().wan)
    weight = momentum = 0.0
    for step in range(10):
        row = 99_990 + step % 2
        grad = mx.nd.sparse.row_sparse_array((mx.nd.ones((1, width)), [row]), shape=(rows, width))
        kv.push("table", grad)
        kv.row_sparse_pull("table", out=out, row_ids=numbers(row))
        if row == 99_990:
            momentum = 0.5 * momentum - 0.5 * kv.num_all_workers
            weight += momentum
        # A single party: its rounds are the job's, synchronous or not.
        assert out.indices.asnumpy().tolist() == [row] and (out.data.asnumpy() == weight).all(), (step, out.data)
    spent = sum(traffic().lan) + sum(traffic().wan) - before
    assert spent < rows * width * 4 / 200, spent
    kv.barrier("all")


class Net(gluon.Block):
    """An embedding and a dense layer."""

    def __init__(self, kind):
        super().__init__()
        with self.name_scope():
            if kind == "weight":
                self.embedding = gluon.contrib.nn.SparseEmbedding(ROWS, WIDTH)
            else:
                self.embedding = gluon.nn.Embedding(ROWS, WIDTH, sparse_grad=kind == "gradient")
            self.dense = gluon.nn.Dense(1, in_units=2 * WIDTH)

    def forward(self, words):
        return self.dense(self.embedding(words).reshape((len(words), -1)))


def build(kind):
    mx.random.seed(4)
    net = Net(kind)
    net.initialize(mx.init.Normal(0.5))
    return net


def batch(rank, step):
    source = np.random.RandomState(100 * step + rank + 1)
    return mx.nd.array(source.randint(0, ROWS, (5, 2))), mx.nd.array(source.randn(5, 1))


def backward(net, rank, step):
    words, target = batch(rank, step)
    with autograd.record():
        loss = (net(words) - target) ** 2
    loss.backward()


def values(net, kv=None):
    found = []
    for parameter in net.collect_params().values():
        whole = parameter._stype == "default"
        rows = mx.nd.arange(ROWS, dtype="int64")
        found.append((parameter.data() if whole else parameter.row_sparse_data(rows)).asnumpy())
    return found


def train(kind):
    kv = mx.kv.create("dist_sync")
    net = build(kind)
    params = {**SETTINGS, "rescale_grad": 1 / (5 * kv.num_all_workers)}
    trainer = gluon.Trainer(net.collect_params(), "sgd", params, kvstore=kv)
    for step in range(STEPS):
        backward(net, kv.global_rank, step)
        trainer.step(1)  # with sparse weights the store needs the optimizer before the first step
    np.savez(f"params-{kv.global_rank}.npz", *values(net))


def alone(ranks):
    net = build("gradient")
    updater = mx.optimizer.get_updater(mx.optimizer.SGD(**SETTINGS, rescale_grad=1 / (5 * ranks)))
    for step in range(STEPS):
        grads = []
        for rank in range(ranks):
            backward(net, rank, step)
            grads.append([parameter.grad().copy() for parameter in net.collect_params().values()])
        for index, parameter in enumerate(net.collect_params().values()):
            updater(index, sum((one[index] for one in grads[1:]), grads[0][index]), parameter.data())
    np.savez("reference.npz", *values(net))


def module(ranks, kv=None):
    """With a store this worker's batches, without one those of all workers."""
    table = mx.sym.var("table", stype="row_sparse", shape=(ROWS, WIDTH))
    words = mx.sym.Embedding(mx.sym.var("data"), table, input_dim=ROWS, output_dim=WIDTH, sparse_grad=True)
    output = mx.sym.LinearRegressionOutput(mx.sym.FullyConnected(words, num_hidden=1, name="dense"), name="out")
    found = mx.mod.Module(output, label_names=["out_label"])
    count = 5 * len(ranks)
    found.bind([("data", (count, 2))], [("out_label", (count, 1))])
    source = np.random.RandomState(8)
    shapes = {"table": (ROWS, WIDTH), "dense_weight": (1, 2 * WIDTH), "dense_bias": (1,)}
    start = {name: mx.nd.array(source.randn(*shape)) for name, shape in shapes.items()}
    found.init_params(arg_params={**start, "table": start["table"].tostype("row_sparse")})
    settings = {**SETTINGS, "wd": 0.0, "rescale_grad": 1 / (5 * (kv.num_all_workers if kv else len(ranks)))}
    found.init_optimizer(kv, "sgd", settings)
    for step in range(STEPS):
        parts = [batch(rank, step) for rank in ranks]
        data = mx.io.DataBatch(*([mx.nd.concat(*item, dim=0)] for item in zip(*parts, strict=True)))
        if kv is not None:
            found.prepare(data, sparse_row_id_fn=lambda one: {"table": one.data[0].reshape(-1)})
        found.forward_backward(data)
        found.update()
    if kv is not None:
        rows = mx.nd.arange(ROWS, dtype="int64")
        found._kvstore.row_sparse_pull("table", out=found._exec_group.execs[0].arg_dict["table"], row_ids=rows)
    arguments = found._exec_group.execs[0].arg_dict
    return {name: arguments[name].asnumpy() for name in shapes}


def train_module():
    kv = mx.kv.create("dist_sync")
    np.savez(f"params-{kv.global_rank}.npz", **module([kv.global_rank], kv))


if sys.argv[1] == "module":
    if len(sys.argv) > 2:
        np.savez("reference.npz", **module(range(int(sys.argv[2]))))
    else:
        train_module()
elif len(sys.argv) > 2:
    alone(int(sys.argv[2]))
elif sys.argv[1] == "rules":
    rules()
elif sys.argv[1].startswith("dist_"):
    count_bytes(sys.argv[1])
else:
    train(sys.argv[1])
