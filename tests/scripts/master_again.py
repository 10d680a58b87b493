"""A master that does not train lowers the rate while two parties train; workers check in which round it takes effect.
"""

import time
from pathlib import Path

import mxnet as mx

kv = mx.kv.create("dist_sync")
SIZES = {"one": 5000, "two": 1500}
kv.init(list(SIZES), [mx.nd.zeros((size,)) for size in SIZES.values()])
if kv.is_master_worker:
    for rate, begun in ((0.5, "."), (0.25, "some"), (0.125, "more")):
        while not Path(begun).exists():
            time.sleep(0.05)
        kv.set_optimizer(mx.optimizer.SGD(learning_rate=rate))
    raise SystemExit
outs = {name: [mx.nd.zeros((size,))] for name, size in SIZES.items()}
rates = {name: [] for name in SIZES}
while any(found[-3:] != [0.125] * 3 for found in rates.values()):
    for name, size in SIZES.items():
        kv.push(name, mx.nd.ones((size,)))
        outs[name].append(mx.nd.zeros((size,)))
        kv.pull(name, out=outs[name][-1])
    for name, (*_, before, now) in outs.items():
        (change,) = set(((before - now) / kv.num_all_workers).asnumpy().tolist())  # the same in all slices
        rates[name].append(change)
    if rates["two"][-3:] == [0.5] * 3:
        Path("some").touch()
    if rates["two"][-3:] == [0.25] * 3:
        Path("more").touch()
for found in rates.values():
    assert sorted(found, reverse=True) == found and set(found) == {0.5, 0.25, 0.125}, found
print("trained", kv.global_rank)
