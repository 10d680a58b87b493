"""Trains in a context manager: context.py NAME STEPS [raises|fails|refused]; see steps.py."""

import sys

import torch
from common import batches, linear, save

import geomx_cli.torch as geomx


def fail(gradient: torch.Tensor) -> None:
    """Tensor hook."""
    raise ValueError("in the middle of a backward pass")


name, steps, how = sys.argv[1], int(sys.argv[2]), (*sys.argv[3:], "")[0]
geomx.init()
rank = geomx.global_rank()
model = linear(seed=rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_of = torch.nn.CrossEntropyLoss()
try:
    with getattr(geomx, name)(model, optimizer) as given:
        assert given is optimizer
        for step, (images, labels) in enumerate(batches(rank, steps)):
            if how == "raises" and rank == 1 and step == 3:
                raise ValueError("no such sample")
            if how == "fails" and rank == 1 and step == 3:
                model.weight.register_hook(fail)
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
            last = model.weight.detach().numpy().copy()
except geomx.InvalidSettings as error:
    assert how == "refused", error
    print(f"{error.message} | {error.hint}")
    sys.exit()
except ValueError:
    print("the loop has ended")
    geomx.finish()  # and the script goes on without training
save(model, gradients=0, rounds=0, last=last)
