"""Unusual parameters: in float16, with a mean that does not overflow though the sum does; without elements; and no_sync
around wrap.
"""

import torch

import geomx_cli.torch as geomx

geomx.init()
rank, count = geomx.global_rank(), geomx.num_all_workers()

halves = torch.nn.Linear(2, 1, bias=False).half()
geomx.wrap(halves, torch.optim.SGD(halves.parameters(), lr=0.0))
(halves(torch.ones(1, 2, dtype=torch.float16)) * 40000).sum().backward()
assert halves.weight.grad.tolist() == [[40000, 40000]]

model = torch.nn.Linear(2, 1)
model.extra = torch.nn.Parameter(torch.empty(0))
with geomx.no_sync():
    optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (model(torch.full((1, 2), rank + 1.0)) + model.extra.sum()).sum().backward()
    assert model.weight.grad.tolist() == [[rank + 1.0] * 2]
(model(torch.full((1, 2), rank + 1.0)) + model.extra.sum()).sum().backward()
assert model.weight.grad.tolist() == [[count + 1.0] * 2]  # the mean of twice 1 to count
optimizer.step()
geomx.finish()
