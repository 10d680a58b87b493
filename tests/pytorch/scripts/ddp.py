"""Trains with DistributedDataParallel, as a script for torchrun: ddp.py STEPS [DTYPE [compile]]; saves RANK.npz in
the directory $SAVE_IN, by default the working directory.
"""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(rank)
layers = torch.nn.Linear(40, 300), torch.nn.BatchNorm1d(300), torch.nn.ReLU(), torch.nn.Linear(300, 300)
model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(300, 10))
if len(sys.argv) > 2:
    model.to(getattr(torch, sys.argv[2]))
kind = next(model.parameters()).dtype
compiled = "compile" in sys.argv
parallel = DistributedDataParallel(model, bucket_cap_mb=25 if compiled else 0.1)  # compiled, the first one has 1 MB
broadcast, broadcasts = parallel._distributed_broadcast_coalesced, []
parallel._distributed_broadcast_coalesced = lambda *given: broadcasts.append(broadcast(*given))
called = torch.compile(parallel, backend="aot_eager") if compiled else parallel
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(100 + rank)
losses = []
for _step in range(int(sys.argv[1])):
    images = torch.randn(16, 40, generator=generator).to(kind)
    labels = torch.randint(0, 10, (16,), generator=generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(called(images), labels)
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone().float()
    dist.all_reduce(mean)
    losses.append(mean.item() / size)
state = {name: tensor.detach().float().numpy() for name, tensor in model.state_dict().items()}
np.savez(f"{os.environ.get('SAVE_IN', '.')}/{rank}.npz", **state, losses=np.array(losses), broadcasts=len(broadcasts),
         backend=dist.get_backend())  # fmt: skip
dist.destroy_process_group()
