"""A worker of two parties of two (and the master, which does not train) that checks the KVStore."""

import os
import random
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.base import MXNetError

KEYS = 62
KIND = int if sys.argv[1] == "int" else "key{}".format
PARTY = os.environ.get("GEOMX_PARTY", "")


def refused(words, call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except MXNetError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def check_refusals(kv):
    dense, sparse = mx.nd.ones((2, 2)), mx.nd.ones((2, 2)).tostype("csr")
    refused("gradient compression '3bit' (set {\"type\"", kv.set_gradient_compression, {"type": "3bit", "threshold": 1})
    refused("takes no argument", kv.set_gradient_compression, {"type": "fp16", "threshold": 1})
    refused("gradient compression 'none'", kv.set_gradient_compression, "none")
    kv.set_gradient_compression({"type": "none"})
    refused("no optimizer on the servers", kv.save_optimizer_states, "x")
    refused("cannot read x", kv.load_optimizer_states, "x")
    refused("no option 'x'", kv.option, "x")
    assert kv.option("algo") == "fsa"
    refused("updater", kv._set_updater, print)
    refused("command 0", kv._send_command_to_servers, 0, "x")
    refused("cannot be profiled", mx.profiler.set_config, filename="x.json", profile_process="server")
    refused("cannot be profiled", mx.profiler.set_state, "run", profile_process="server")
    refused("csr", kv.push, KIND(0), sparse)
    refused("initialised already", kv.init, KIND(0), dense)
    refused("not been initialised", kv.push, KIND(999), dense)
    refused("not been initialised", kv.abstain, KIND(999))
    refused("elements of float32", kv.pull, KIND(0), out=mx.nd.ones((3,)))
    refused("int32", kv.init, KIND(998), dense.astype("int32"))
    refused("int or str", kv.init, "x" if KIND is int else 7, dense)
    refused("capability", kv.is_capable, "x")
    refused("no NDArray", kv.push, KIND(0), np.ones((2, 2)))
    refused("momentum of sgd must be", kv.set_optimizer, mx.optimizer.SGD(momentum=float("nan")))
    assert kv.is_capable("optimizer") and isinstance(kv, mx.kvstore.KVStore)


def check_sums(kv, rank):
    """1, 2, 3, 4 from the four workers; the pushed array keeps its value, and results arrive in order."""
    pushed, out = mx.nd.full((2, 2), rank + 1), mx.nd.zeros((2, 2))
    outs = [mx.nd.zeros((2, 2)) for _ in range(5)]
    for step in range(5):
        kv.push(KIND(0), pushed + 10 * step)
        kv.pull(KIND(0), out=outs[step])
    kv.push(KIND(0), pushed)
    kv.pull(KIND(0), out=out)
    assert (out.asnumpy() == 10).all(), out
    assert (pushed.asnumpy() == rank + 1).all()
    assert [float(one[1, 1].asscalar()) for one in outs] == [10 + 40 * step for step in range(5)]
    devices = [mx.nd.full((2, 2), rank + 1, ctx=mx.cpu(index)) for index in range(3)]
    taken = [mx.nd.zeros((2, 2), ctx=mx.cpu(index)) for index in range(2)]
    kv.pushpull(KIND(0), devices, out=taken)
    assert all((one.asnumpy() == 30).all() for one in taken)
    kv.push([KIND(0), KIND(1)], [pushed, pushed * 2])
    kv.pull([KIND(0), KIND(1)], out=[out, taken[0]])
    assert (float(out[0, 0].asscalar()), float(taken[0][0, 0].asscalar())) == (10, 20)
    kv.push(KIND(0), [pushed, pushed])
    kv.pull(KIND(0), out=out)
    assert (out.asnumpy() == 20).all()
    big = mx.nd.arange(8).reshape((4, 2)) * 0 + rank
    kv.push(KIND(0), big[1:3])
    kv.pull(KIND(0), out=big[2:4])
    assert big.asnumpy()[:, 0].tolist() == [rank, rank, 6, 6], big


def check_abstaining(kv, rank):
    """Abstain: one worker, a whole party, and all but the pushes around them; results arrive in order."""
    outs = [mx.nd.ones((2, 2)) * -1 for _ in range(4)]
    for out, there in zip(outs, ((0, 1, 2, 3), (0, 2, 3), (0, 1), (0, 1, 2, 3)), strict=True):
        if rank in there:
            kv.push([KIND(0), KIND(1)], [mx.nd.full((2, 2), rank + 1)] * 2)
        else:
            kv.abstain([KIND(0), KIND(1)])
        kv.pull(KIND(0), out=out)
    assert [float(out[1, 0].asscalar()) for out in outs] == [10, 8, 3, 10]


def check_dtypes(kv, rank):
    kv.init([KIND(100), KIND(101)], [mx.nd.zeros((3,), dtype="float16"), mx.nd.zeros((3,), dtype="float64")])
    half, double = mx.nd.zeros((3,), dtype="float16"), mx.nd.zeros((3,), dtype="float64")
    kv.pushpull(
        KIND(100), [mx.nd.full((3,), 2048 if rank == 0 and d == 0 else 1, dtype="float16") for d in range(4)], half
    )
    kv.pushpull(KIND(101), mx.nd.full((3,), 1 + 1e-13, dtype="float64"), out=double)
    single = mx.nd.zeros((3,))
    kv.pull(KIND(100), out=single)
    kv.pull(KIND(101), out=half.copy())
    refused("elements of float16, not 3 of float32", kv.push, KIND(100), single)
    assert single.asnumpy().tolist() == [2064.0] * 3
    assert half.asnumpy().tolist() == [2064.0] * 3 and abs(double.asnumpy()[0] - 4 - 4e-13) < 1e-15, (half, double)


def check_many(kv, rank):
    """Pull and push all keys in a worker-specific order, more than the engine has threads."""
    order = random.Random(rank)
    outs = [mx.nd.zeros((2, 2)) for _ in range(KEYS)]
    for step in range(3):
        keys = list(range(KEYS))
        order.shuffle(keys)
        for key in keys:
            kv.push(KIND(key), mx.nd.full((2, 2), key + step), priority=-key)
        order.shuffle(keys)
        for key in keys:
            kv.pull(KIND(key), out=outs[key], priority=-key)
        sums = [one + 1 for one in outs]
        assert [float(one[0, 0].asscalar()) for one in sums] == [4 * (key + step) + 1 for key in range(KEYS)]


def check_fork(kv):
    """A DataLoader forks while a pull waits for the network."""
    out = mx.nd.zeros((2, 2))
    kv.push(KIND(0), mx.nd.ones((2, 2)))
    kv.pull(KIND(0), out=out)
    data = gluon.data.SimpleDataset([np.full((2,), i, np.float32) for i in range(4)])
    seen = [batch.asnumpy()[0, 0] for batch in gluon.data.DataLoader(data, 2, num_workers=1)]
    assert seen == [0, 2] and (out.asnumpy() == 4).all()


def check_layouts(kv, rank):
    """Gradients of wide convolutions, which oneDNN keeps in its own layouts, arrive as asnumpy() shows them."""
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(32, 3), gluon.nn.Conv2D(64, 3), gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True)
    images = mx.nd.random.normal(shape=(4, 16, 9, 9))
    for _ in range(2):
        with autograd.record():
            loss = (net(images) ** 2).mean()
        loss.backward()
        grads = [parameter.grad() for parameter in net.collect_params().values()]
        if not hasattr(check_layouts, "known"):
            check_layouts.known = True
            kv.init([KIND(200 + i) for i in range(len(grads))], [grad * 0 for grad in grads])
        sums = [mx.nd.zeros(grad.shape) for grad in grads]
        for index, (grad, total) in enumerate(zip(grads, sums, strict=True)):
            kv.push(KIND(200 + index), grad * 0 if rank else grad)
            kv.pull(KIND(200 + index), out=total)
        if rank == 0:
            assert all(np.array_equal(total.asnumpy(), grad.asnumpy()) for total, grad in zip(sums, grads, strict=True))
        weights = [parameter.data() for parameter in net.collect_params().values()]
        net(images)  # not recorded: oneDNN changes the layout of the weights at some later time
        for index, weight in enumerate(weights):
            kv.pull(KIND(200 + index), out=weight)
        assert all(np.array_equal(one.asnumpy(), total.asnumpy()) for one, total in zip(weights, sums, strict=True))
        mx.nd.waitall()


def check_memory(kv, rank):
    """A value changed after its push was sent unchanged; pulls into views write in place."""
    value, out = mx.nd.full((2, 2), rank + 1), mx.nd.zeros((5, 2))
    kv.push(KIND(1), value)
    value[:] = 50
    kv.pull(KIND(1), out=out[1:3])
    kv.push(KIND(2), value)
    kv.pull(KIND(2), out=value)
    kv.push(KIND(2), value)
    kv.pull(KIND(2), out=[value, value])
    assert out.asnumpy().tolist() == [[0, 0], [10, 10], [10, 10], [0, 0], [0, 0]]
    assert (value.asnumpy() == 4 * 4 * 50).all()
    slow, kept = mx.nd.ones((400, 400)), mx.nd.zeros((2, 2))
    for _ in range(20):
        slow = mx.nd.dot(slow, slow) * 1e-3
    kept[:] = slow[:2, :2]  # slow, so that the pull has to wait for it
    kv.abstain(KIND(2)) if rank else kv.push(KIND(2), value)
    kv.pull(KIND(2), out=kept)
    kv.push(KIND(2), [mx.nd.full((2, 2), 7) for _ in range(2)])
    assert (kept.asnumpy() == 4 * 4 * 50).all()
    kv.push(KIND(2), out[2:4])
    kv.pull(KIND(2), out=value)
    assert value.asnumpy().tolist() == [[40, 40], [0, 0]]


def main():
    kv = mx.kv.create("dist_sync")
    assert mx.kv.create("dist_async") is kv and mx.kv.create("dist_device_sync") is kv
    assert type(mx.kv.create("local")) is mx.kvstore.KVStore and mx.kv.create("local").type == "local"
    value = 99 if kv.is_master_worker else 100 + "AB".index(PARTY)
    for key in range(KEYS):
        kv.init(KIND(key), mx.nd.full((2, 2), value + key))
    outs = [mx.nd.zeros((2, 2)) for _ in range(KEYS)]
    for key in range(KEYS):
        kv.pull(KIND(key), out=outs[key], priority=-key)
    assert [float(one[0, 1].asscalar()) for one in outs] == [99 + key for key in range(KEYS)]
    assert (kv.type, kv.num_all_workers) == ("dist_sync", 4)
    if kv.is_master_worker:
        assert (kv.rank, kv.global_rank, kv.num_workers) == (0, -1, 1)
        kv.init([KIND(100), KIND(101)], [mx.nd.zeros((3,), dtype="float16"), mx.nd.zeros((3,), dtype="float64")])
        shapes = [(32, 16, 3, 3), (32,), (64, 32, 3, 3), (64,), (4, 1600), (4,)]
        kv.init([KIND(200 + i) for i in range(6)], [mx.nd.zeros(shape) for shape in shapes])
        return
    assert kv.num_workers == 2 and kv.global_rank in (kv.rank, 2 + kv.rank) and kv.party == PARTY
    rank = kv.global_rank
    check_refusals(kv)
    check_sums(kv, rank)
    check_abstaining(kv, rank)
    check_dtypes(kv, rank)
    check_many(kv, rank)
    check_layouts(kv, rank)
    check_memory(kv, rank)
    check_fork(kv)
    kv.barrier("all")
    kv._barrier()


main()
