"""Trains until the job is asked to stop, and saves after how many steps that was; with "handles" it has a handler of its
own for SIGTERM.
"""

import signal
import sys
import time
from pathlib import Path

import torch
from common import batches, linear

import geomx_cli.torch as geomx

geomx.init()
rank = geomx.global_rank()
if "handles" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: Path(f"handled-{rank}").touch())
model = linear()
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.01))
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
    time.sleep(0.01 * (1 + rank))
assert geomx.should_stop(), "from then on"
geomx.finish()
Path(f"stopped-{rank}").write_text(str(step))
