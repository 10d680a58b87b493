"""A worker of two parties that trains, saves the optimizer's state and continues, or in another job loads it and
continues.

Arguments: "save", "load" (global rank 0 alone does) or "loads" (every worker); the optimizer; "hand" or "trainer".
Writes the final weights to PHASE-RANK.npz, and those at the save to saved-RANK.npz.
"""

import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.base import MXNetError

PHASE, NAME, WAY = sys.argv[1:4]
HALF = 3
SHAPES = {"big": (700, 50), "small": (5,), "half": (40, 3), "unused": (2,)}


def optimizer():
    schedule = mx.lr_scheduler.FactorScheduler(2, factor=0.5, base_lr=0.1) if NAME == "scheduled" else None
    if NAME == "adam":
        return mx.optimizer.Adam(learning_rate=0.01, rescale_grad=0.25)
    return mx.optimizer.SGD(
        learning_rate=0.1, momentum=0.9, wd=0.01, rescale_grad=0.25, multi_precision=True, lr_scheduler=schedule
    )


def refused(words, call, *args):
    try:
        call(*args)
    except MXNetError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"not refused: {words}")


def initial():
    source = np.random.RandomState(7)
    return {
        name: mx.nd.array(source.randn(*shape), dtype="float16" if name == "half" else "float32")
        for name, shape in SHAPES.items()
    }


def step(kv, weights, number):
    for index, (name, weight) in enumerate(weights.items()):
        if name != "unused":
            source = np.random.RandomState(1000 * number + 10 * kv.global_rank + index)
            kv.push(name, mx.nd.array(source.randn(*weight.shape), dtype=weight.dtype), priority=-index)
            kv.pull(name, out=weight, priority=-index)


def check_refusals(kv, weights):
    refused("cannot write nowhere/states", kv.save_optimizer_states, "nowhere/states")
    refused("cannot read nowhere", kv.load_optimizer_states, "nowhere")
    np.savez("others.npz", weights=np.zeros(3))
    refused("no whole file of optimizer states", kv.load_optimizer_states, "others.npz")
    Path("torn").write_bytes(Path("states").read_bytes()[:-100])
    refused("no whole file of optimizer states", kv.load_optimizer_states, "torn")


def by_hand():
    kv = mx.kv.create("dist_sync")
    saved = PHASE != "save"
    weights = initial()
    if saved:
        weights = {name: mx.nd.array(array, dtype=array.dtype) for name, array in np.load("saved-0.npz").items()}
    if kv.is_master_worker or kv.global_rank == 0:
        kv.set_optimizer(optimizer())
    order = list(weights) if PHASE == "save" else list(reversed(weights))
    kv.init(order, [weights[name] for name in order])
    if kv.global_rank < 0:
        return
    for weight in weights.values():
        weight[:] = 0
    kv.pull(list(weights), out=list(weights.values()))
    if saved:
        if PHASE == "loads" or kv.global_rank == 0:
            kv.load_optimizer_states("states")
        kv.barrier("all")
    else:
        for number in range(HALF):
            step(kv, weights, number)
        if kv.global_rank in (0, kv.num_all_workers - 1):
            kv.save_optimizer_states("states" if kv.global_rank == 0 else "states-last", dump_optimizer=True)
        if kv.global_rank == 0:
            check_refusals(kv, weights)
        np.savez(f"saved-{kv.global_rank}.npz", **{name: weight.asnumpy() for name, weight in weights.items()})
    for number in range(HALF, 2 * HALF):
        step(kv, weights, number)
    np.savez(f"{PHASE}-{kv.global_rank}.npz", **{name: weight.asnumpy() for name, weight in weights.items()})


def by_trainer():
    mx.random.seed(2)
    net = gluon.nn.Dense(3, in_units=4)
    net.initialize(mx.init.Normal(0.5))
    trainer = gluon.Trainer(net.collect_params(), optimizer(), kvstore="dist_sync", update_on_kvstore=True)
    kv = mx.kv.create("dist_sync")
    half = range(HALF)
    if PHASE != "save":
        net.load_parameters(f"net-{max(0, kv.global_rank)}.params")
        if kv.global_rank >= 0:
            trainer.load_states("trainer")
        half = range(HALF, 2 * HALF)
    for number in half:
        train(net, trainer, kv, number)
    if PHASE == "save":
        if kv.global_rank == 0:
            trainer.save_states("trainer")
        net.save_parameters(f"net-{kv.global_rank}.params")
        for number in range(HALF, 2 * HALF):
            train(net, trainer, kv, number)
    found = {name: parameter.data().asnumpy() for name, parameter in net._collect_params_with_prefix().items()}
    np.savez(f"{PHASE}-{kv.global_rank}.npz", **found)


def train(net, trainer, kv, number):
    source = np.random.RandomState(100 * number + kv.global_rank + 1)
    with autograd.record():
        loss = (net(mx.nd.array(source.randn(6, 4))) ** 2).sum()
    loss.backward()
    trainer.step(1)


by_hand() if WAY == "hand" else by_trainer()
