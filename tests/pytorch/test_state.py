"""A script that saves its state goes on at the same batch when its worker is killed, with the same bits."""

import itertools
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from desk import Desk
from killed_scripts import calm, play
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.data import ShardSampler
from geomx_cli.runtime.frontends.torch.loader_place import place_in
from geomx_cli.runtime.frontends.torch.packing import pack_state, unpack_state
from geomx_cli.runtime.frontends.torch.random_state import random_state, set_random_state
from geomx_cli.runtime.training.worker_algorithm import State

SCRIPT = str(Path(__file__).parent / "scripts" / "stateful.py")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "loader"),
    [
        ("--algo fsa", "shuffle"), ("--algo diloco --inner-steps 4 --compress int8", "sampler"),
    ],
)  # fmt: skip
def test_a_gan_whose_workers_are_killed_has_the_same_bits(options: str, loader: str, desk: Desk) -> None:
    given = {"epochs": 4, "loader": loader}
    calmly, slowly = (["python", SCRIPT, json.dumps({**given, "pause": pause})] for pause in (0, 0.05))
    words = ["--framework", "torch", "--parties", "2", "--workers", "1", *options.split()]
    undisturbed = calm(desk, "calm", words, calmly, "torch")
    disturbed = play(desk, "disturbed", words, slowly, "torch", kills="worker,server", count=2)
    assert len(undisturbed) == 2 and [line.removesuffix("resumed") for line in disturbed] == undisturbed


class Numbers(IterableDataset):  # type: ignore[type-arg, unused-ignore]
    def __iter__(self) -> Any:
        return iter(torch.arange(20))


class Restless:
    """A sampler that draws from Python's random numbers when it begins."""

    def __iter__(self) -> Any:
        order = list(range(40))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 40


DATA = TensorDataset(torch.arange(40))
LOADERS = {
    "shuffle": lambda: DataLoader(DATA, 4, shuffle=True),
    "last": lambda: DataLoader(DATA, 7, shuffle=True),
    "workers": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=2, persistent_workers=True),
    "single": lambda: DataLoader(DATA, None, sampler=RandomSampler(DATA)),
    "restless": lambda: DataLoader(DATA, 4, sampler=Restless()),
    "ours": lambda: DataLoader(DATA, 4, sampler=ShardSampler(DATA, 1, 2, shuffle=True, seed=3)),
    "iterable": lambda: DataLoader(Numbers(), 4),
    "stateful": lambda: StatefulDataLoader(DATA, 4, shuffle=True),
    "stateful workers": lambda: StatefulDataLoader(DATA, 4, shuffle=True, num_workers=2),
    "stateful iterable": lambda: StatefulDataLoader(Numbers(), 4),
    "list": lambda: [[torch.tensor(number)] for number in range(9)],
}


def step() -> None:
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.SGD([weight], lr=0.1).step()


def passes(loader: Any, count: int, start: int = 0, found: "tuple[State, State] | None" = None, stop: int = -1) -> Any:
    """What passes over a loader give, and random numbers drawn between; or, at `stop`, the place and random state."""
    seen = []
    for number in range(count):
        place = place_in(loader, "loader")
        done, goes_on = 0, found is not None and number == 0
        if goes_on:
            place.load(found[0], start)
            done = start
        batches = place.begin() if place.begins_first or (goes_on and start) else None
        if goes_on:
            set_random_state(found[1])
        while True:
            if len(seen) == stop:
                return seen, done, State.from_bytes(place.state().to_bytes()), random_state()
            batches = place.begin() if batches is None else batches
            try:
                batch = next(batches)
            except StopIteration:
                break
            seen.append((torch.as_tensor(batch[0]).tolist(), torch.rand(1).item(), random.random()))
            step()
            place.advance()
            done += 1
    return seen


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.processes
@pytest.mark.parametrize("kind", LOADERS)
def test_a_pass_goes_on_at_its_place(kind: str) -> None:
    def begin() -> Any:
        torch.manual_seed(5)
        random.seed(6)
        return LOADERS[kind]()

    whole = passes(begin(), 3)
    for stop in (0, 3, 5, 9):
        seen, done, place, random_numbers = passes(begin(), 3, stop=stop)
        torch.rand(3)
        begun = (stop - done) // (len(whole) // 3)
        went_on = passes(LOADERS[kind](), 3 - begun, done, (place, random_numbers))
        assert seen + went_on == whole, stop


def test_an_epoch_uses_each_sample_once_with_any_number_of_workers() -> None:
    drawn: list[int] = []
    before = [ShardSampler(DATA, rank, 4, shuffle=True, seed=2) for rank in range(4)]
    for sampler in before:
        drawn += list(itertools.islice(iter(sampler), 3))
    place = before[0].place(3, within=True)
    assert place == {"epoch": 0, "offset": 12} == before[3].place(3, within=True)
    for rank in range(2):
        sampler = ShardSampler(DATA, rank, 2, shuffle=True, seed=2)
        sampler.go_on(place)
        drawn += list(sampler)
        assert sampler.place(0, within=False)["epoch"] == 1  # nothing is repeated, though this life took no step
    assert sorted(drawn) == list(range(40))


def test_what_state_dicts_hold_comes_back() -> None:
    tree = {
        "state": {0: {"step": torch.tensor(3.0), "average": torch.randn(2, 3, dtype=torch.bfloat16)}, 1: {}},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "params": [0, 1], "nesterov": False}],
        "milestones": Counter({5: 1, 7: 2}), "order": OrderedDict(b=1, a=2), "set": {1, 2}, "name": "é",
        "many": 1 << 100, "bits": b"\x00\x01", "array": np.arange(4.0), "scalar": np.float32(2.5),
        "dtype": torch.float16, "none": torch.empty(0, 3), "infinite": float("-inf"),
        "flag": torch.tensor([True, False]), "recent": deque([1.5, (2, 3)], maxlen=3), "all": deque([1]),
        "counts": defaultdict(int, a=1), "lists": defaultdict(list), "plain": defaultdict(None, {1: 2}),
        "buffer": bytearray(b"\x02"),
    }  # fmt: skip
    found = unpack_state(State.from_bytes(pack_state(tree, "tree").to_bytes()))
    assert repr(found) == repr(tree) and type(found["milestones"]) is Counter and type(found["order"]) is OrderedDict
    assert torch.equal(found["state"][0]["average"], tree["state"][0]["average"])  # type: ignore[index]


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(InvalidSettings, match=r"scheduler\['lambdas'\]\[0\] is a builtins.function"):
        pack_state({"lambdas": [lambda epoch: epoch]}, "scheduler")
    with pytest.raises(InvalidSettings, match=r"layout torch\.sparse_coo"):
        pack_state([torch.eye(3).to_sparse()], "model")
    with pytest.raises(InvalidSettings, match=r"counts\['x'\] is a defaultdict of <function"):
        pack_state({"x": defaultdict(lambda: 3)}, "counts")


@pytest.mark.processes
@pytest.mark.parametrize("options", ["fsa", "hfa --k1 4 --k2 2", "diloco --inner-steps 5", "mixed"])
def test_a_worker_may_die_while_it_waits_for_others_to_finish(options: str, desk: Desk) -> None:
    words = ["--parties", "1", "--workers", "2", "--framework", "torch", "--algo", *options.split()]
    command = ["python", str(Path(__file__).parent / "scripts" / "ends_early.py")]
    undisturbed = calm(desk, "calm", words, [*command, "0"], "torch")
    disturbed = play(desk, "disturbed", words, [*command, "1"], "torch")
    assert [line.split()[2] for line in disturbed] == ["True", "False"]
    compared = disturbed if options == "mixed" else [*disturbed, *undisturbed]  # that depends on timing
    found = {line.split()[1] for line in compared}
    assert len(found) == 1
