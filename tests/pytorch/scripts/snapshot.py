"""A script for torchrun, which goes on from its snapshot. In its first life one worker dies in step 5:
snapshot.py FILE killed|raises RANK.
"""

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import geomx_cli.torch as geomx

STEPS, AT = 12, 5
path, how, lost = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(1)
net = torch.nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
first = 0
if path.exists():
    found = torch.load(path)
    net.load_state_dict(found["net"])
    optimizer.load_state_dict(found["optimizer"])
    first = found["step"]
print(f"restarts {restarts}, {os.environ['GEOMX_RESTART_COUNT']}: from step {first}", flush=True)
model = DistributedDataParallel(net)
for step in range(first, STEPS):
    if (step, rank, restarts) == (AT, lost, "0"):
        if how == "raises":
            raise ValueError("a batch is damaged")
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    loss = model(torch.full((1, 4), step + rank + 1.0)).square().mean()
    (loss * 1e-3).backward()
    optimizer.step()
    geomx.report(loss=loss, step=step)
    if rank == 0:
        new = path.with_suffix(".new")
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, new)
        new.replace(path)
if rank == 0:
    print(f"weights {net.weight.detach().reshape(-1).tolist()}", flush=True)
