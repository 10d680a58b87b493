"""Worker 1 is killed, ends, skips a batch in the middle of training, or does not make the last call of worker 0:
lost.py killed|ended|skipped|last wait|backward.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from geomx_cli.core.errors import GeomxError

how, where = sys.argv[1:]
dist.init_process_group("nccl")
model = DistributedDataParallel(torch.nn.Linear(200, 200))
for step, (batch,) in enumerate(DataLoader(TensorDataset(torch.ones(2000, 200)), 2)):
    if step == 5 and how == "last":
        break
    if step == 5 and dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "skipped":
            continue
        break
    if step == 20 and how == "skipped":
        break
    try:
        if where == "wait":
            work = dist.all_reduce(torch.ones(10), async_op=True)
            work.wait()
        else:
            model(batch).sum().backward()
    except GeomxError as error:
        print(f"step {step}: {type(error).__name__}: {error}", flush=True)
        raise
if how == "last" and dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
