"""A GAN that saves its state: two models, two optimizers with schedules, dropout and batch normalization."""

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
data = TensorDataset(torch.tensor(numbers.normal(size=(240, 16)), dtype=torch.float32), torch.arange(240))
judge = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.LeakyReLU(), nn.Dropout(0.3), nn.Linear(24, 1))
forger = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 16))
judges, forges = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (judge, forger))
geomx.wrap(judge, judges)
geomx.wrap(forger, forges)
slower = torch.optim.lr_scheduler.StepLR(judges, 5, 0.9)
torch.manual_seed(100 + rank)
if options["loader"] == "sampler":
    loader = DataLoader(data, 8, sampler=geomx.sampler(data))
else:
    loader = DataLoader(geomx.shard(data), 8, shuffle=True)
state = geomx.state(judge=judge, forger=forger, judges=judges, forges=forges, slower=slower, seen=0)
loss_of = nn.functional.binary_cross_entropy_with_logits
for _ in state.epochs(options["epochs"]):
    for real, indices in state.batches(loader):
        time.sleep(options["pause"])
        forged = forger(torch.randn(len(real), 4))
        judges.zero_grad()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        (loss_of(judge(real), ones) + loss_of(judge(forged.detach()), zeros)).backward()
        judges.step()
        forges.zero_grad()
        judge.requires_grad_(False)
        loss_of(judge(forged), ones).backward()
        judge.requires_grad_(True)
        forges.step()
        slower.step()
        state.seen = (state.seen * 31 + int((indices * torch.arange(1, len(indices) + 1)).sum())) % 1_000_003
        geomx.report(samples=len(real))
geomx.finish()
tensors = [*judge.state_dict().values(), *forger.state_dict().values()]
digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
found = [rank, digest, state.seen, slower.get_last_lr(), state.epoch]
print("FOUND", json.dumps(found), "resumed" if state.resumed else "", flush=True)
