"""Buffers in DistributedDataParallel that are not statistics: each forward pass finds those of rank 0."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, values):
        self.seen = float(self.scale)
        return values * self.scale


torch.manual_seed(rank)
model = DistributedDataParallel(nn.Sequential(nn.BatchNorm1d(4), Scale(), nn.Linear(4, 2)))
scale, norm = model.module[1], model.module[0]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(15):
    scale.scale.fill_(step + 10 * rank)
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    assert scale.seen == step
scale.scale.fill_(0)
del scale.scale
scale.scale = 1.0  # now the only buffers are statistics
for _step in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
norm.running_mean.fill_(rank + 5)
model.eval()
model(torch.randn(8, 4))
assert norm.running_mean.tolist() == [5.0] * 4, "evaluation reads those of rank 0"
