"""A DataLoader goes on within an epoch, with the batches and random numbers of one that was not interrupted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, RandomSampler

from geomx_cli.runtime.frontends.torch.loader_place import place_in
from geomx_cli.runtime.frontends.torch.random_state import random_state, set_random_state
from geomx_cli.runtime.frontends.torch.trainers.batch_order import BatchOrder

EPOCHS, BATCHES, AHEAD = 3, 6, 2


class Noisy(Dataset[Any]):
    """Indices, and noise of their own each time."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())


def plain() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True)


def generated() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(8))


def divided() -> DataLoader[Any]:
    return DataLoader(Noisy(), batch_size=4, sampler=DistributedSampler(Noisy(), 1, 0))


def replaced() -> DataLoader[Any]:
    sampler = RandomSampler(Noisy(), replacement=True, num_samples=4 * BATCHES)
    return DataLoader(Noisy(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))


LOADERS = pytest.mark.parametrize("make", [plain, generated, divided, replaced])


def text(batch: Any) -> str:
    """With the random number that a step draws after it."""
    indices, noise = batch
    return f"{indices.tolist()} {noise.tolist()} {torch.rand(()).item()}"


@LOADERS
@pytest.mark.parametrize("at", [0, 1, BATCHES + 3, 2 * BATCHES, 3 * BATCHES])
def test_a_script_goes_on(make: Callable[[], Any], at: int) -> None:
    """As `geomx_cli.torch.state` does: its place is saved before a batch is loaded."""
    torch.manual_seed(3)
    loader, saved, straight = make(), None, []
    for epoch in range(EPOCHS):
        place = place_in(loader, "loader")
        batches: Iterator[Any] | None = None
        for batch in range(BATCHES + 1):
            if (epoch, batch) == divmod(at, BATCHES) or (at == EPOCHS * BATCHES == epoch * BATCHES + batch):
                saved = epoch, batch, place.state(), random_state()
            batches = batches or place.begin()
            if (found := next(batches, None)) is not None:
                straight.append(text(found))
                place.advance()
        straight.append(f"{torch.rand(()).item()}")
    assert saved is not None
    first, done, state, numbers = saved
    torch.manual_seed(99)
    loader, again = make(), []
    for epoch in range(first, EPOCHS):
        place = place_in(loader, "loader")
        if epoch == first:
            place.load(state, done)
        batches = place.begin() if epoch == first and done else None
        if epoch == first:
            set_random_state(numbers)
        again += [text(found) for found in batches or place.begin()]
        again.append(f"{torch.rand(()).item()}")
    assert again == straight[-len(again) :] and len(again) == EPOCHS * (BATCHES + 1) - at - first


@LOADERS
@pytest.mark.parametrize("at", [0, 3, BATCHES - 1])
def test_a_loop_that_loads_ahead_goes_on(make: Callable[[], Any], at: int) -> None:
    """As HF's Trainer does: its place is saved when the batches of a step, and one more, are loaded."""
    torch.manual_seed(3)
    loader = make()
    order = BatchOrder.put_in(loader)
    order.notes = True
    straight: list[str] = []
    for epoch in range(EPOCHS):
        for batch, found in enumerate(ahead(iter(loader))):
            if (epoch, batch) == (1, at):
                state, numbers = order.place(at), random_state()
            straight.append(text(found))
    torch.manual_seed(99)
    loader, again = make(), []
    order = BatchOrder.put_in(loader)
    order.return_to(state, skips=True)
    for epoch in range(1, EPOCHS):
        for batch, found in enumerate(ahead(iter(loader))):
            if (epoch, batch) == (1, 0):
                set_random_state(numbers)
                order.end_return()
            again.append(text(found))
    assert again == straight[BATCHES + at :]


def ahead(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches, each once the next ones are loaded."""
    loaded = [next(batches)]
    while loaded:
        loaded += [each for _ in range(1 + AHEAD - len(loaded)) if (each := next(batches, None)) is not None]
        yield loaded.pop(0)
