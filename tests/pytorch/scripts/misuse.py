"""Takes five steps in a way that would train something else than it seems to: misuse.py HOW [divided]."""

import sys

import torch
from common import batches, divide, linear, save

import geomx_cli.torch as geomx

how = sys.argv[1]
geomx.init()
rank = geomx.global_rank()
model = linear(seed=1)
if how == "swap":
    model.unused = torch.nn.Parameter(torch.tensor([torch.nan, -0.0]))
if sys.argv[2:] == ["divided"]:
    divide(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
alone = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}


def clip(parameter: torch.nn.Parameter) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def step(parameter: torch.nn.Parameter) -> None:
    alone[parameter].step()
    alone[parameter].zero_grad()


for each in alone.values() if how == "step" else (optimizer,):
    geomx.wrap(model, each)
for parameter in model.parameters() if how in ("clip", "step") else ():
    parameter.register_post_accumulate_grad_hook(clip if how == "clip" else step)
if how == "wide":
    model.double()
for number, (images, labels) in enumerate(batches(rank, 5), 1):
    if number == 3 and how == "swap":  # an evaluation with other weights
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in own.items()})
        model.load_state_dict(own)
        model.unused.data[1] = 0.0
    elif number == 3 and how == "weights":
        with torch.no_grad():
            model.weight.clamp_(-0.01, 0.01)
    elif number == 3 and how == "data":  # of which autograd has no version
        model.weight.data.clamp_(-0.01, 0.01)
    elif number == 3 and how == "state":
        other = torch.optim.SGD(linear().parameters(), lr=0.1, momentum=0.9)
        for tensor in other.param_groups[0]["params"]:
            tensor.grad = torch.ones_like(tensor)
        other.step()
        optimizer.load_state_dict(other.state_dict())
    elif number == 3 and how == "rate" and rank == 1:
        optimizer.param_groups[0]["lr"] = 1.0
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images.to(model.weight.dtype)), labels).backward()
    if how != "step":
        optimizer.step()
if how in ("failed", "cleared"):  # the last pass fails in all workers, and the script goes on

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("out of memory")

    inputs = images.requires_grad_()
    inputs.register_hook(fail)
    try:
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    except RuntimeError:
        optimizer.zero_grad(set_to_none=how == "cleared")
geomx.finish()
if sys.argv[2:] != ["divided"]:
    save(model)
