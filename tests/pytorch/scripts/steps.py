"""Trains a dense layer: steps.py STEPS..., by rank; the last number is for all further ranks.

rounds: the steps after which the weights were others than the optimizer's step had left.
"""

import copy
import io
import os
import sys

import numpy as np
import torch
from common import batches, linear, save

import geomx_cli.torch as geomx

geomx.init()
rank = geomx.global_rank()
steps = int(sys.argv[1:][min(rank, len(sys.argv) - 2)])
device = os.environ.get("TEST_DEVICE", "cpu")
model = linear(seed=rank).to(device)
start = [parameter.detach().to(device) for parameter in linear(seed=0).parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.set_default_device("meta")  # what geomx itself creates is where it has to be
assert geomx.wrap(model, optimizer) is optimizer
assert all(torch.equal(one, other) for one, other in zip(model.parameters(), start, strict=True)), "not the master's"
copy.deepcopy(model), torch.save((model, optimizer), io.BytesIO())
loss_of = torch.nn.CrossEntropyLoss()
gradients, rounds = [], []
for step, (images, labels) in enumerate(batches(rank, steps), 1):
    optimizer.zero_grad()
    loss_of(model(input=images.to(device)), labels.to(device)).backward()  # by name, as many models are called
    gradients.append(model.weight.grad.cpu().numpy().copy())
    expected = model.weight.detach() - 0.1 * model.weight.grad
    optimizer.step()
    if not torch.allclose(model.weight, expected, rtol=0, atol=1e-7):
        rounds.append(step)
geomx.finish()
save(model, gradients=np.array(gradients), rounds=np.array(rounds))
