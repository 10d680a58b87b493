"""Several models with an optimizer each, with two workers: each case equals training in one process on both batches."""

import copy
from typing import Any

import torch
from common import CLASSES, FEATURES, batches, save
from torch import nn

import geomx_cli.torch as geomx

geomx.init()
RANK, COUNT = geomx.global_rank(), geomx.num_all_workers()
assert COUNT == 2
STEPS = list(zip(*(batches(rank, 4) for rank in range(COUNT)), strict=True))
finals: dict[str, Any] = {}


class Layers(nn.Module):
    """Two layers, and a parameter that is in no loss."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 7), nn.Linear(7, outputs)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, values: Any) -> Any:
        return self.last(torch.tanh(self.first(values)))


def trainers(*models: nn.Module) -> list[Any]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]


def pair(*sizes: tuple[int, int]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Wrapped models and optimizers, and plain copies."""
    torch.manual_seed(10 + RANK)
    models = [Layers(*size) for size in sizes]
    optimizers = [geomx.wrap(*each) for each in zip(models, trainers(*models), strict=True)]
    alone = copy.deepcopy(models)
    return models, optimizers, alone, trainers(*alone)


def check(name: str, models: Any, alone: Any) -> None:
    for model, other in zip(models, alone, strict=True):
        for mine, expected in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)
    finals[name] = torch.cat([item.detach().reshape(-1) for model in models for item in model.parameters()]).numpy()


def joint_losses() -> None:
    """One backward pass for two models, whose gradients arrive in another order in each worker."""
    models, optimizers, alone, others = pair((FEATURES, CLASSES), (FEATURES, 1))

    def loss(group: Any, batch: Any, backwards: bool) -> Any:
        images, labels = batch
        losses = [
            lambda: nn.functional.cross_entropy(group[0](images), labels),
            lambda: group[1](images).square().mean(),
        ]
        return sum(each() for each in (reversed(losses) if backwards else losses))

    for step in STEPS:
        for optimizer in (*optimizers, *others):
            optimizer.zero_grad()
        loss(models, step[RANK], backwards=RANK == 1).backward()
        sum(loss(alone, batch, backwards=False) / COUNT for batch in step).backward()
        for optimizer in (*optimizers, *others):
            optimizer.step()
    check("joint", models, alone)


def adversaries() -> None:
    """A generator whose step passes through the discriminator, whose own gradients of it are dropped."""
    noise = torch.randn(len(STEPS), COUNT, 8, 4, generator=torch.Generator().manual_seed(5))
    one, zero = torch.ones(8, 1), torch.zeros(8, 1)
    loss_of = nn.functional.binary_cross_entropy_with_logits

    def train(group: Any, optimizers: Any, ranks: list[int]) -> None:
        generator, discriminator = group
        for number, step in enumerate(STEPS):
            optimizers[1].zero_grad()
            for real in (True, False):  # two passes, which accumulate
                inputs = [step[rank][0] if real else generator(noise[number, rank]).detach() for rank in ranks]
                losses = [loss_of(discriminator(each), one if real else zero) for each in inputs]
                (sum(losses) / len(ranks)).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            losses = [loss_of(discriminator(generator(noise[number, rank])), one) for rank in ranks]
            (sum(losses) / len(ranks)).backward()
            optimizers[0].step()

    models, optimizers, alone, others = pair((4, FEATURES), (FEATURES, 1))
    train(models, optimizers, [RANK])
    train(alone, others, list(range(COUNT)))
    check("adversaries", models, alone)


def actor_and_critic() -> None:
    """The actor's loss depends on the critic, whose target is a copy that follows it and is not trained."""
    models, optimizers, alone, others = pair((FEATURES, 2), (FEATURES + 2, 1))
    targets = copy.deepcopy(models[1]), copy.deepcopy(alone[1])

    def train(group: Any, target: Any, trained: Any, ranks: list[int]) -> None:
        actor, critic = group
        for step in STEPS:
            states = [step[rank][0] for rank in ranks]
            with torch.no_grad():
                goals = [1 + 0.9 * target(torch.cat((each, actor(each)), 1)) for each in states]
            trained[1].zero_grad()
            values = [critic(torch.cat((each, actor(each).detach()), 1)) for each in states]
            pairs = zip(values, goals, strict=True)
            (sum((value - goal).square().mean() for value, goal in pairs) / len(ranks)).backward()
            trained[1].step()
            critic.requires_grad_(False)
            trained[0].zero_grad()
            (sum(-critic(torch.cat((each, actor(each)), 1)).mean() for each in states) / len(ranks)).backward()
            trained[0].step()
            critic.requires_grad_(True)
            with torch.no_grad():
                for new, old in zip(critic.parameters(), target.parameters(), strict=True):
                    old.lerp_(new, 0.1)

    train(models, targets[0], optimizers, [RANK])
    train(alone, targets[1], others, list(range(COUNT)))
    check("actor and critic", models, alone)


def one_model_with_two_optimizers() -> None:
    """Which are wrapped together."""

    def train(model: Any, optimizers: Any, ranks: list[int]) -> None:
        for step in STEPS:
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [nn.functional.cross_entropy(model(step[rank][0]), step[rank][1]) for rank in ranks]
            (sum(losses) / len(ranks)).backward()
            for optimizer in optimizers:
                optimizer.step()

    def halves(model: Any) -> list[Any]:
        rest = [model.last.weight, model.last.bias, model.unused]
        return [torch.optim.SGD(model.first.parameters(), lr=0.1), torch.optim.Adam(rest, lr=0.01)]

    torch.manual_seed(30 + RANK)
    model = Layers(FEATURES, CLASSES)
    given = halves(model)
    assert geomx.wrap(model, given) is given
    alone = copy.deepcopy(model)
    train(model, given, [RANK])
    train(alone, halves(alone), list(range(COUNT)))
    check("two optimizers", [model], [alone])


def refusals() -> None:
    model = Layers(2, 2)
    wrapped = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    second = Layers(2, 2)
    for module, optimizer, why in (
        (model, torch.optim.SGD([model.first.weight], lr=0.1), "first.weight is in two wrapped optimizers"),
        (model, wrapped, "wrapped already"),
        (second, torch.optim.LBFGS(second.parameters()), "LBFGS with --"),
    ):
        try:
            geomx.wrap(module, optimizer)
        except geomx.InvalidSettings as error:
            assert why in error.message and error.hint, error
        else:
            raise AssertionError(why)


joint_losses()
adversaries()
actor_and_critic()
one_model_with_two_optimizers()
refusals()
geomx.finish()
save(nn.Module(), **finals)
