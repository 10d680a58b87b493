"""A worker that fails while the others wait for it: breaks.py HOW. The others report what `backward` raised."""

import sys
import time
from pathlib import Path

import torch
from common import batches, linear
from torch import nn

import geomx_cli.torch as geomx

how = sys.argv[1]


def hang(gradient: torch.Tensor) -> None:
    """Tensor hook."""
    Path("ready").touch()
    time.sleep(30)


geomx.init()
rank = geomx.global_rank()
model: nn.Module = linear(seed=rank)
if how == "shape" and rank == 1:
    model = nn.Linear(12, 6)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if how == "state" and rank == 1:
    model(torch.ones(1, 12)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    optimizer.step()
try:
    geomx.wrap(model, optimizer)
    loss_of = nn.CrossEntropyLoss()
    for step, (images, labels) in enumerate(batches(rank, 100)):
        if step == 3 and rank == 1:
            if how == "raises":
                raise ValueError("no such sample")
            if how == "killed":
                # One of the two tensors' gradients is on its way.
                model.weight.register_hook(hang)
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
except geomx.GeomxError as error:
    print(f"{type(error).__name__}: {error.message} | {error.hint}", flush=True)
    raise
