"""Worker 1 is killed, or ends, in the middle of training: lost.py killed|ended wait|backward."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from geomx_cli.core.errors import GeomxError

how, where = sys.argv[1:]
dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(200, 200))
for step in range(1000):
    if step == 5 and dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        break
    try:
        if where == "wait":
            work = dist.all_reduce(torch.ones(10), async_op=True)
            work.wait()
        else:
            model(torch.ones(2, 200)).sum().backward()
    except GeomxError as error:
        print(f"step {step}: {type(error).__name__}: {error}", flush=True)
        raise
