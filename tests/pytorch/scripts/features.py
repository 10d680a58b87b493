"""What PyTorch scripts do in their loops, with two workers: each case equals training in one process on both batches.

Each case wraps a model of its own. A worker knows the other's batches, so it computes the expected model itself.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from common import CLASSES, FEATURES, batches, save
from torch import nn

import geomx_cli.torch as geomx

geomx.init()
RANK, COUNT = geomx.global_rank(), geomx.num_all_workers()
assert COUNT == 2
loss_of = nn.CrossEntropyLoss()
finals: dict[str, Any] = {}


def all_batches(steps: int) -> list[list[tuple[Any, Any]]]:
    """The batches of each step, by rank."""
    return list(zip(*(batches(rank, steps) for rank in range(COUNT)), strict=True))


def wrapped(make: Callable[[], Any], make_optimizer: Callable[[Any], Any], **options: Any) -> tuple[Any, ...]:
    """A wrapped model and optimizer, and plain copies that start from the same tensors."""
    torch.manual_seed(10 + RANK)
    model = make()
    optimizer = geomx.wrap(model, make_optimizer(model), **options)
    alone = copy.deepcopy(model)
    for parameter in alone.parameters():
        parameter._post_accumulate_grad_hooks = None
    return model, optimizer, alone, make_optimizer(alone)


def check(name: str, model: Any, alone: Any, rtol: float = 1e-4) -> None:
    """The trained model is the expected one."""
    for (key, mine), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=rtol, atol=rtol / 100, msg=lambda text: f"{key}: {text}")  # noqa: B023
    finals[name] = torch.cat([item.detach().float().reshape(-1) for item in model.parameters()]).numpy()


def clipping_groups_and_schedules() -> None:
    def make_optimizer(model: Any) -> Any:
        groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias], "lr": 0.3}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    model, optimizer, alone, optimizer_alone = wrapped(layers, make_optimizer)
    schedules = [torch.optim.lr_scheduler.StepLR(item, 2, gamma=0.5) for item in (optimizer, optimizer_alone)]
    for step in all_batches(6):
        optimizer.zero_grad()
        loss_of(model(step[RANK][0]), step[RANK][1]).backward()
        optimizer_alone.zero_grad()
        joint(alone, step).backward()
        for each in (model, alone):
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
        optimizer.step()
        optimizer_alone.step()
        for schedule in schedules:
            schedule.step()
    check("clipping", model, alone)
    state = optimizer.state_dict()
    optimizer_alone.load_state_dict(state)  # it is a plain optimizer's
    assert state["param_groups"][1]["lr"] == 0.3 / 8


def layers() -> Any:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, CLASSES))


def joint(model: Any, step: Any) -> Any:
    """The mean loss of all workers' batches."""
    images, labels = (torch.cat(parts) for parts in zip(*step, strict=True))
    return loss_of(model(images), labels)


def accumulation() -> None:
    model, optimizer, alone, optimizer_alone = wrapped(layers, lambda model: torch.optim.Adam(model.parameters(), 0.01))
    steps = all_batches(6)
    for number, step in enumerate(steps):
        loss, is_last = loss_of(model(step[RANK][0]), step[RANK][1]), number % 3 == 2
        if is_last:
            loss.backward()
        else:
            with geomx.no_sync():
                loss.backward()
        joint(alone, step).backward()
        if is_last:
            for each in (optimizer, optimizer_alone):
                each.step()
                each.zero_grad()
    check("accumulation", model, alone)
    with geomx.no_sync():
        loss_of(model(steps[0][0][0]), steps[0][0][1]).backward()
    refused(optimizer, "gradients of this worker only")
    loss_of(model(steps[0][0][0]), steps[0][0][1]).backward()


def mixed_precision() -> None:
    """GradScaler sees an overflow of either worker in both."""
    model, optimizer, alone, optimizer_alone = wrapped(layers, lambda model: torch.optim.SGD(model.parameters(), 0.1))
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100) for _ in range(2)]
    for number, step in enumerate(all_batches(5)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(step[RANK][0]), step[RANK][1])
            expected = joint(alone, step)
        factors = (float("inf") if number == 2 and RANK == 1 else 1.0, float("inf") if number == 2 else 1.0)
        for value, each, optimizer_of, scaler, factor in zip(
            (loss, expected), (model, alone), (optimizer, optimizer_alone), scalers, factors, strict=True
        ):
            optimizer_of.zero_grad()
            scaler.scale(value * factor).backward()
            scaler.unscale_(optimizer_of)
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer_of)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
    check("mixed precision", model, alone, rtol=2e-2)


class Odd(nn.Module):
    """Frozen, shared and unused parameters, and buffers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, FEATURES)
        self.frozen.requires_grad_(False)
        self.shared = nn.Linear(FEATURES, FEATURES)
        self.again = nn.Linear(FEATURES, FEATURES)
        self.again.weight = self.shared.weight
        self.last = nn.Linear(FEATURES, CLASSES)
        self.never = nn.Linear(2, 2)
        self.sometimes = nn.Parameter(torch.randn(CLASSES))
        self.register_buffer("number", torch.tensor(2**60 + 10 + RANK))
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("coarse", torch.randn(3, 5).bfloat16())
        self.register_buffer("exact", torch.tensor([float("nan"), -0.0, 1e-45]).double() + torch.rand(3).double())
        self.register_buffer("none", torch.zeros(0))

    def forward(self, images: Any) -> Any:
        return self.last(self.again(torch.relu(self.shared(self.frozen(images)))))


def odd_parameters() -> None:
    torch.manual_seed(10)
    masters = dict(Odd().state_dict())
    masters["number"] = torch.tensor(2**60 + 10)
    model, optimizer, alone, optimizer_alone = wrapped(Odd, lambda model: torch.optim.SGD(model.parameters(), 0.1))
    for name, tensor in model.state_dict().items():
        same = tensor.reshape(-1).view(torch.uint8), masters[name].reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name
    for step in all_batches(4):
        optimizer.zero_grad()
        loss = loss_of(model(step[RANK][0]) + (model.sometimes if RANK == 1 else 0), step[RANK][1])
        loss.backward()
        assert model.never.weight.grad is None and model.sometimes.grad is not None
        optimizer_alone.zero_grad()
        parts = [loss_of(alone(images), labels) for images, labels in step[:1]]
        parts += [loss_of(alone(images) + alone.sometimes, labels) for images, labels in step[1:]]
        (sum(parts) / COUNT).backward()
        optimizer.step()
        optimizer_alone.step()
    check("odd", model, alone)


def changes_after_wrap() -> None:
    """An optimizer that would train what is not exchanged."""
    model = layers()
    model[0].bias.requires_grad_(False)
    optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
    model[0].bias.requires_grad_(True)
    images, labels = all_batches(1)[0][RANK]
    loss_of(model(images), labels).backward()
    refused(optimizer, "parameter 0.bias has a gradient, and was frozen")
    model[0].bias.grad = None
    optimizer.step()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    refused(optimizer, "the optimizer has other parameters")
    del optimizer.param_groups[1:]
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(7, FEATURES))
    refused(optimizer, "the optimizer has other parameters")
    optimizer.param_groups[0]["params"][0] = model[0].weight
    other = layers()
    optimizer = geomx.wrap(other, torch.optim.SGD(other.parameters(), 0.1))
    other[2] = nn.Linear(7, CLASSES)
    loss_of(other(images), labels).backward()
    refused(optimizer, "the model has got parameter 2.weight since it was wrapped")


def tensors_without_memory() -> None:
    """Of their own."""
    shared, nowhere = layers(), layers()
    shared[0].bias = nn.Parameter(torch.zeros(1).expand(7))
    nowhere.to("meta")
    for model, why in ((shared, "elements of tensor 0.bias share memory"), (nowhere, "is on the device meta")):
        try:
            geomx.wrap(model, torch.optim.SGD(model.parameters(), 0.1))
        except geomx.InvalidSettings as error:
            assert why in error.message and error.hint
        else:
            raise AssertionError(why)


def refused(optimizer: Any, why: str) -> None:
    try:
        optimizer.step()
    except geomx.InvalidSettings as error:
        assert why in error.message and error.hint
    else:
        raise AssertionError(why)


def statistics() -> None:
    """Running statistics become means; those of a model without this are of one worker at the end."""
    def make() -> Any:
        return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))

    def make_optimizer(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer, _, _ = wrapped(make, make_optimizer, buffers="mean")
    for step in all_batches(2):
        optimizer.zero_grad()
        loss_of(model(step[RANK][0]), step[RANK][1]).backward()
        optimizer.step()
    expected = torch.zeros(FEATURES)
    for step in all_batches(2):
        means = torch.stack([images.mean(dim=0) for images, _ in step]).mean(dim=0)
        expected = 0.9 * expected + 0.1 * means
    torch.testing.assert_close(model[0].running_mean, expected)
    finals["statistics"] = model[0].running_var.numpy().copy()


def half() -> None:
    """bfloat16 parameters, gradients in another layout, and zero_grad(set_to_none=False)."""
    def make() -> Any:
        return nn.Conv2d(3, 8, 3).bfloat16().to(memory_format=torch.channels_last)

    model, optimizer, alone, optimizer_alone = wrapped(make, lambda model: torch.optim.SGD(model.parameters(), 0.1))
    random = torch.Generator().manual_seed(3)
    for _ in range(3):
        step = torch.randn(COUNT, 2, 3, 5, 5, generator=random).bfloat16()
        optimizer.zero_grad(set_to_none=False)
        model(step[RANK]).float().square().mean().backward()
        optimizer.step()
        optimizer_alone.zero_grad()
        alone(step.flatten(0, 1)).float().square().mean().backward()
        optimizer_alone.step()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=2e-2, atol=2e-3)
    finals["half"] = torch.cat([item.detach().float().reshape(-1) for item in model.parameters()]).numpy()


clipping_groups_and_schedules()
accumulation()
mixed_precision()
odd_parameters()
changes_after_wrap()
tensors_without_memory()
statistics()
half()
images = torch.arange(10 * COUNT + 1)
part = geomx.shard(torch.utils.data.TensorDataset(images))
drawn = geomx.sampler(images)
finals["part"] = torch.tensor([int(item[0]) for item in part]).numpy()
if geomx.global_rank() == 1:
    next(iter(drawn))  # no step follows, so it is still in the first epoch
epochs = [*drawn]
torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1).step()
finals["drawn"] = torch.tensor([*epochs, *drawn]).numpy()
geomx.finish()
save(nn.Module(), **finals)
