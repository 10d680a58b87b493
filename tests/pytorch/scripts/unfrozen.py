"""Unfreezes a layer after DistributedDataParallel was built, which does not exchange its gradients."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
model[0].requires_grad_(False)
parallel = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
torch.manual_seed(100 + dist.get_rank())
for step in range(40):
    if step == 10:
        model[0].requires_grad_(True)
    optimizer.zero_grad()
    parallel(torch.randn(8, 8)).square().mean().backward()
    optimizer.step()
print("RESULT done", flush=True)
