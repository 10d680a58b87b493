"""A training that saves its state, in a process group of the party (`--reduce torch`): grouped.py OPTIONS, in JSON.

shards: whether fully_shard divides the model. pause: seconds in each step.
"""

import hashlib
import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import geomx_cli.torch as geomx

geomx.init()
rank, options = geomx.global_rank(), json.loads(sys.argv[1])
torch.manual_seed(7)
numbers = np.random.default_rng(3)
data = TensorDataset(torch.tensor(numbers.normal(size=(320, 16)), dtype=torch.float32), torch.arange(320) % 4)
model = nn.Sequential(nn.Linear(16, 24), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(24, 4))
if options["shards"]:
    from torch.distributed.fsdp import fully_shard

    for part in (model[0], model):
        fully_shard(part)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
geomx.wrap(model, optimizer)
slower = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.95)
torch.manual_seed(100 + rank)
loader = DataLoader(data, 8, sampler=geomx.sampler(data))
state = geomx.state(model=model, optimizer=optimizer, slower=slower, seen=0)
loss_of = nn.CrossEntropyLoss()
for _ in state.epochs(options["epochs"]):
    for inputs, labels in state.batches(loader):
        time.sleep(options["pause"])
        optimizer.zero_grad()
        loss_of(model(inputs), labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        slower.step()
        state.seen = (state.seen * 31 + int((labels * torch.arange(1, len(labels) + 1)).sum())) % 1_000_003
        geomx.report(samples=len(labels))
geomx.finish()
tensors = [tensor.to_local() if options["shards"] else tensor for tensor in model.state_dict().values()]
moments = [each["exp_avg"] for each in optimizer.state_dict()["state"].values()]
tensors += [tensor.to_local() if options["shards"] else tensor for tensor in moments]
digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
print("FOUND", json.dumps([rank, digest, state.seen, state.epoch]), "resumed" if state.resumed else "", flush=True)
