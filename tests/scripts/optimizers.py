"""A worker whose script sets optimizers in turn, checked against MXNet's own on the sums of all workers' gradients.

Arguments: which worker sets them: "all" (also ones that cannot be sent), "first" (global rank 0 alone), "master" (which
does not train, once, with a schedule and multipliers) or "custom" (as "master", but one that cannot be sent); and the
topology. Keys are initialised before and after the optimizer, and some after the first push.
"""

import sys

import mxnet as mx
import numpy as np

(WHO, TOPOLOGY), STEPS = sys.argv[1:], 5
SHAPES = {"one_weight": (130, 25), "one_bias": (3,), "two_bias": (40,), "late_big_weight": (60, 9), "late_weight": (2,)}
COMMON = {"rescale_grad": 0.25, "wd": 0.03, "param_idx2name": dict(enumerate(SHAPES))}
ON_SERVERS = ("sgd", "nag", "adam", "adagrad", "rmsprop")
ON_WORKERS = ("signum", "ftrl", "adamax", "adadelta", "ftml", "lamb", "test")


def optimizer(name, rate=0.05):
    more = {"momentum": 0.9} if name in ("sgd", "nag", "signum") else {}
    made = mx.optimizer.create(name, learning_rate=rate, **COMMON, **more)
    made.set_lr_mult({"one_bias": 2.0, "late_weight": 0.5})
    return made


def scheduled():
    schedule = mx.lr_scheduler.MultiFactorScheduler([5, 9, 11], 0.5, base_lr=0.1, warmup_steps=3)
    made = mx.optimizer.SGD(learning_rate=0.1, lr_scheduler=schedule, momentum=0.5, **COMMON)
    made.set_lr_mult({"one_bias": 2.0})
    return made


def gradient(name, rank, step):
    source = np.random.RandomState(1000 * step + 10 * (rank + 1) + list(SHAPES).index(name))
    return source.randn(*SHAPES[name]).astype(np.float32)


class Oracle:
    """The same computation in one process from all gradients, each key separately."""

    def __init__(self, ranks):
        self.ranks, self.weights, self.updaters = ranks, {}, {}

    def use(self, make):
        self.make = make
        self.updaters = {}

    def update(self, name, step):
        index = list(SHAPES).index(name)
        updater = self.updaters.setdefault(name, mx.optimizer.get_updater(self.make()))
        total = sum(gradient(name, rank, step) for rank in range(self.ranks))
        updater(index, mx.nd.array(total), self.weights[name])
        return self.weights[name]


def initial(name, rank):
    """The master's value, and for late keys that of global rank 0."""
    in_place = name.startswith("late") and rank == 0 and TOPOLOGY == "central"
    mine = kv.is_master_worker or in_place
    return mx.nd.full(SHAPES[name], list(SHAPES).index(name) + 1.0 if mine else 77.0)


def init(names):
    kv.init(names, [initial(name, kv.global_rank) for name in names])
    for name in names:
        oracle.weights[name] = mx.nd.full(SHAPES[name], list(SHAPES).index(name) + 1.0)


def train(names, steps):
    """Push all steps before waiting for the first result."""
    outs = {}
    for step in steps:
        for name in names:
            kv.push(name, mx.nd.array(gradient(name, kv.global_rank, step)))
            outs[step, name] = mx.nd.zeros(SHAPES[name])
            kv.pull(name, out=outs[step, name])
        for name in names:
            oracle.update(name, step)
    for name in names:
        found, wanted = outs[steps[-1], name].asnumpy(), oracle.weights[name].asnumpy()
        np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5, err_msg=f"{name} {steps}")


def use(make, mine=True):
    if mine:
        kv.set_optimizer(make())
    oracle.use(make)


kv = mx.kv.create("dist_sync")
oracle = Oracle(kv.num_all_workers)
names = list(SHAPES)[:2]
if WHO in ("master", "custom"):
    make = scheduled if WHO == "master" else lambda: optimizer("test")
    init(names)
    use(make, mine=kv.is_master_worker)
    init(["two_bias"])
    names = [*names, "two_bias"]
    train(names, range(7))
    init(["late_big_weight", "late_weight"])
    train(list(SHAPES), range(7, 14))
else:
    init(names)
    use(lambda: optimizer("sgd"), mine=kv.is_master_worker or WHO == "all")
    init(["two_bias"])
    train([*names, "two_bias"], range(3))
    init(["late_big_weight", "late_weight"])
    train(list(SHAPES), range(3, STEPS))
    turns = [(name, 0.02) for name in ON_SERVERS] + [("adam", 0.01)]
    if WHO == "all":
        turns += [(name, 0.02) for name in ON_WORKERS]
    for turn, (name, rate) in enumerate(turns, 1):
        use(lambda name=name, rate=rate: optimizer(name, rate), mine=WHO == "all" or kv.global_rank == 0)
        train(list(SHAPES), range(STEPS * turn, STEPS * (turn + 1)))
print("trained", kv.global_rank)
