"""One of two workers saves the optimizer's states repeatedly while the other loads one of two files."""

from pathlib import Path

import mxnet as mx
import numpy as np

TIMES = 12
kv = mx.kv.create("dist_sync")
weights = {"one": mx.nd.zeros((3000,)), "two": mx.nd.zeros((60, 50)), "three": mx.nd.zeros((7,))}
if kv.is_master_worker:
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
kv.init(list(weights), list(weights.values()))


def step():
    for name, weight in weights.items():
        kv.push(name, mx.nd.ones(weight.shape))
        kv.pull(name, out=weight)


def states(path):
    with np.load(path) as file:
        return {name: file[name].tobytes() for name in file.files}


for name in ("early", "late"):
    step()
    if kv.global_rank == 0:
        kv.save_optimizer_states(name)
    kv.barrier("all")
if kv.global_rank == 1:
    for number in range(TIMES):
        kv.load_optimizer_states("early" if number % 2 else "late")
    kv.load_optimizer_states("early")
    Path("loaded").touch()
else:
    known, seen = {name: states(name) for name in ("early", "late")}, []
    while not Path("loaded").exists() or len(seen) < TIMES:
        kv.save_optimizer_states("now")
        seen.append([name for name in known if states("now") == known[name]])
    kv.save_optimizer_states("now")  # after the last load
    seen.append([name for name in known if states("now") == known[name]])
    assert all(len(found) == 1 for found in seen), seen
    assert seen[-1] == ["early"], seen
kv.barrier("all")
step()
print("done", kv.global_rank)
