"""Trains until the job is asked to stop, and saves after how many steps that was.

"handles": it has a handler of its own for SIGTERM. "divides": fully_shard divides its model. "ddp":
DistributedDataParallel exchanges its gradients.
"""

import signal
import sys
import time
from pathlib import Path

import torch
from common import batches, divide, linear

import geomx_cli.torch as geomx

if "ddp" in sys.argv:
    torch.distributed.init_process_group()
else:
    geomx.init()
rank = geomx.global_rank()
if "handles" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: Path(f"handled-{rank}").touch())
model = linear()
if "divides" in sys.argv:
    divide(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if "ddp" in sys.argv:
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    geomx.wrap(model, optimizer)
loss_of = torch.nn.CrossEntropyLoss()
batch, step = batches(rank, 1)[0], 0
while True:
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()
    step += 1
    if geomx.should_stop():
        break
    if step == 5:
        Path(f"trains-{rank}").touch()
    time.sleep(0.03 * (1 + rank))
assert geomx.should_stop(), "from then on"
if "ddp" not in sys.argv:
    geomx.finish()
Path(f"stopped-{rank}").write_text(str(step))
