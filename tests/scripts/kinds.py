"""One of two workers of a job whose master has a store of the type in argument 1; argument 2: "hand" or "trainer".

Asynchronous: the first worker completes its rounds before the second one begins. Synchronous: they run together. By
hand, only the master's store type matters.
"""

import os
import sys

import mxnet as mx
import numpy as np
from mxnet import gluon
from mxnet.base import MXNetError

KIND, WAY = sys.argv[1:3]
ROUNDS, KEYS, RATE = 4, 40, 0.5
ALONE = "_async" in KIND
KINDS = ("dist", "dist_device", "dist_sync", "dist_async", "dist_sync_device", "dist_async_device", "dist_device_sync")


def check_standing(kv, mine):
    assert isinstance(kv, mx.kvstore.KVStore) and kv.type == mine
    assert all(mx.kv.create(kind) is kv for kind in (*KINDS, "DIST_SYNC"))
    assert kv.num_all_workers == 2 and kv.global_rank in (0, 1) and 0 <= kv.rank < kv.num_workers
    try:
        mx.kv.create("dist_snyc")
    except MXNetError as error:
        assert "did you mean dist_sync?" in str(error), error
        return
    raise AssertionError("not refused")


def by_hand(kv):
    """All keys in one call; each round adds the pushed values times the rate."""
    if kv.is_master_worker:
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=RATE))
    names = [f"key {index}" for index in range(KEYS)]
    weights = [mx.nd.full((index + 1, 3), 100 + index) for index in range(KEYS)]
    kv.init(names, weights)
    if kv.global_rank < 0:
        return
    check_standing(kv, KIND if kv.is_master_worker else "dist_sync")
    kv.pull(names, out=weights)
    pushed = mx.nd.full((3, 3), 1 + kv.global_rank)
    if ALONE and kv.global_rank == 1:
        kv.barrier("all")
    for number in range(1, ROUNDS + 1):
        kv.push(names, [pushed[0].broadcast_to(weight.shape) for weight in weights])
        kv.pull(names, out=weights)
        taken = (1 * number if kv.global_rank == 0 else ROUNDS + 2 * number) if ALONE else 3 * number
        for index, weight in enumerate(weights):
            assert (weight.asnumpy() == 100 + index - RATE * taken).all(), (number, index, weight)
    assert (pushed.asnumpy() == 1 + kv.global_rank).all()
    if ALONE and kv.global_rank == 0:
        kv.barrier("all")
    kv.barrier("all")
    kv.pull(names, out=weights)  # this worker has changed nothing since, but the other has
    for index, weight in enumerate(weights):
        assert (weight.asnumpy() == 100 + index - RATE * 3 * ROUNDS).all(), (index, weight)


def by_trainer(kv):
    weight = gluon.Parameter("weight", shape=(2, 3), init=mx.init.Constant(10))
    weight.initialize()
    if ALONE:
        try:
            gluon.Trainer([weight], "sgd", {}, kvstore=kv, update_on_kvstore=False)._init_kvstore()
        except ValueError:
            pass
        else:
            raise AssertionError("MXNet refuses it")
    trainer = gluon.Trainer([weight], "sgd", {"learning_rate": RATE}, kvstore=kv)
    trainer._init_kvstore()
    trainer._init_params()
    if ALONE and kv.global_rank == 1:
        kv.barrier("all")
    for _ in range(ROUNDS):
        with mx.autograd.record():
            loss = (weight.data() * (1 + kv.global_rank)).sum()
        loss.backward()
        trainer.step(1)
    taken = ROUNDS * (1 if ALONE and kv.global_rank == 0 else 3)
    assert np.array_equal(weight.data().asnumpy(), np.full((2, 3), 10 - RATE * taken)), weight.data()
    if ALONE and kv.global_rank == 0:
        kv.barrier("all")
    kv.barrier("all")


def main():
    master = "DMLC_ROLE_MASTER_WORKER" in os.environ or os.environ.get("GEOMX_RANK") == "0"
    kv = mx.kv.create(KIND if master or WAY == "trainer" else "dist_sync")
    by_hand(kv) if WAY == "hand" else by_trainer(kv)


main()
