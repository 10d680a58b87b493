"""Local steps with a GradScaler: the second step of worker 1 has gradients that are not finite, and is skipped.

all_together: after each step, whether all workers then had the same weights, which they compare with a collective.
"""

import numpy as np
import torch
import torch.distributed as dist
from common import batches, linear, save
from torch.nn.parallel import DistributedDataParallel

import geomx_cli.torch as geomx

dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(linear(seed=rank))
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
loss_of = torch.nn.CrossEntropyLoss()
together = []
for step, (images, labels) in enumerate(batches(rank, 6), 1):
    optimizer.zero_grad()
    loss = loss_of(model(images), labels)
    scaler.scale(loss * (float("inf") if (rank, step) == (1, 2) else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    weights = [torch.empty_like(model.module.weight) for _ in range(2)]
    dist.all_gather(weights, model.module.weight.detach())
    together.append(torch.equal(*weights))
geomx.finish()
save(model.module, all_together=np.array(together))
