"""Takes one step with bfloat16 weights, and then rounds without a step: half.py ROUNDS."""

import copy
import sys
from typing import Any

import numpy as np
import torch

import geomx_cli.torch as geomx


def train(model: Any, optimizer: Any, *, moves: bool) -> None:
    optimizer.param_groups[0]["lr"] = 0.02 if moves else 0.0
    optimizer.zero_grad()
    model.weight.float().square().sum().backward()
    optimizer.step()


geomx.init()
torch.manual_seed(1)
model = torch.nn.Linear(40, 30, bias=False).bfloat16()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
geomx.wrap(model, optimizer)
alone = copy.deepcopy(model)
start = model.weight.detach().float().numpy().copy()
train(alone, torch.optim.SGD(alone.parameters(), lr=0.02), moves=True)
for round_ in range(int(sys.argv[1])):
    train(model, optimizer, moves=round_ == 0)
geomx.finish()
np.savez(f"{geomx.global_rank()}.npz", start=start, stepped=alone.weight.detach().float().numpy(),
         weight=model.weight.detach().float().numpy())  # fmt: skip
