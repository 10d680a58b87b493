"""Which optimizer a root runs in which round: requests by its members, and refusals."""

import re
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench, KeptLink

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.aggregation.optimizer_history import SERIAL, OptimizerHistory, Successor
from geomx_cli.ps.cluster.members import CENTRAL, Member, ServerMembers
from geomx_cli.ps.optim import optimizers
from geomx_cli.ps.optimizer_service import OptimizerService
from geomx_cli.runtime.algorithms.fsa import FsaServer

POLY = ("poly", {
    "base_lr": 1.0, "warmup_steps": 0.0, "warmup_begin_lr": 0.0, "warmup_final_lr": 1.0, "warmup_constant": False,
    "max_update": 10.0, "base_lr_orig": 1.0, "final_lr": 0.0, "power": 1.0,
})  # fmt: skip


def sgd(rate: float, **more: float) -> optimizers.Optimizer:
    return optimizers.create("sgd", {"learning_rate": rate, **more})


class Slice:
    """A slice whose gradients are ones: each update subtracts the rate from its weight."""

    def __init__(self, history: OptimizerHistory) -> None:
        self.history, self.weight = history, np.zeros(1)
        self.entry: Any = SimpleNamespace(key=4, hyper={}, optimizer_state={})
        self.ignored: list[tuple[str, str]] = []

    def round(self, number: int, **news: float) -> float:
        optimizer = self.history.choose(
            self.entry, number, news, lambda name, why: self.ignored.append((name, why))
        )
        if optimizer is None:
            return 0.0
        before, self.weight = self.weight, optimizer.update(self.entry.optimizer_state, self.weight, np.ones(1))
        return float((before - self.weight)[0])


def test_each_slice_changes_over_with_the_contribution_that_says_so() -> None:
    history = OptimizerHistory()
    early, late = Slice(history), Slice(history)
    assert early.round(1) == 0.0
    history.use(sgd(0.5, momentum=0.5), {4: {"lr_mult": 2.0}})
    assert [early.round(2), early.round(3)] == [1.0, 1.5]
    history.add(1, Successor(sgd(0.25, momentum=0.5)))
    assert early.round(4, learning_rate=1.0) == 2.75, "it is only registered"
    assert early.round(5, **{SERIAL: 1.0}) == 0.25, "it begins afresh: no momentum, rate or multiplier of the former"
    assert early.round(6, **{SERIAL: 1.0}) == 0.375 and late.history.newest is history.newest
    assert early.round(7, **{SERIAL: 7.0, "learning_rate": 9.0}) == 0.4375
    assert early.ignored == [(SERIAL, "asks for optimizer 7, which nobody has set")]


def test_a_master_says_from_which_round_on() -> None:
    history = OptimizerHistory()
    history.use(sgd(0.5), {})
    history.add(1, Successor(sgd(0.25), {}, {4: 3}))
    old = Slice(history)
    assert [old.round(number) for number in (1, 2, 3, 4)] == [0.5, 0.5, 0.25, 0.25]
    history.add(2, Successor(sgd(0.125), {4: {"lr_mult": 2.0}}, {9: 100}))
    assert old.round(5) == 0.25, "a key that no root has closed a round of"
    assert history.present(old.entry.hyper) is history.newest


def test_optimizers_that_nobody_uses_replace_none_that_is_used() -> None:
    history = OptimizerHistory()
    history.use(sgd(1.0), {})
    slice_ = Slice(history)
    for serial in range(1, 1000):
        history.add(serial, Successor(sgd(0.5)))
    assert slice_.round(1) == 1.0


def test_optimizers_that_one_member_sets_replace_none_that_another_has_just_set() -> None:
    history = OptimizerHistory()
    history.use(sgd(1.0), {})
    slice_ = Slice(history)
    history.add(1, Successor(sgd(0.25), by="A/worker:0"))
    for serial in range(2, 1000):
        history.add(serial, Successor(sgd(0.5), by="B/worker:0"))
    assert slice_.round(1, **{SERIAL: 1.0}) == 0.25 and len(history._known) < 100


def test_a_long_history_is_short() -> None:
    history = OptimizerHistory()
    history.use(sgd(1.0), {})
    lagging = Slice(history)
    for serial in range(1, 1000):
        history.add(serial, Successor(sgd(1.0 / serial)))
    assert len(history._known) < 100 and lagging.round(1, **{SERIAL: 999.0}) == pytest.approx(1 / 999)


class MemberLink(KeptLink):
    """The link of a party's server, or of the master."""

    def __init__(self, plane: str) -> None:
        super().__init__()
        self.name, self.hello = plane, {"rank": 0, "plane": plane, "workers": 1}


class Root(Bench):
    """A root with a party of one worker, of rank 0, and a master that does not train."""

    def __init__(self, *, asynchronous: bool = False) -> None:
        plane = PlaneSettings("localhost", 1, servers=1, workers=1)
        self.members = ServerMembers(NodeSettings(role="global_server", local=plane, upper=plane), True)
        algorithm = FsaServer(asynchronous=asynchronous)
        super().__init__(required_contributors=self.members.required_contributors, algorithm=algorithm)
        self.links = [MemberLink("global"), MemberLink("local")]
        for link in self.links:
            self.members.arrive(link)  # type: ignore[arg-type]
        self.service = OptimizerService(self.rounds, self.members)
        self.init(np.zeros(SIZE, np.float32))
        self.number, self.value = 0, 0.0

    def ask(self, rank: int = 0, by: str = "A", **body: Any) -> dict[str, Any]:
        begun = self.rounds.table.last_round > 0
        try:
            return self.service.apply(
                {"name": "sgd", "params": {}, "by": by, "begun": begun, **body}, Member(by, rank=rank)
            )
        finally:
            self.rounds.members_changed()  # as the server does after answering

    def push_ones(self, **hyper: float) -> None:
        self.number += 1
        self.push(0, self.number, np.ones(SIZE, np.float32), hyper=hyper)

    def changes(self) -> list[float]:
        """The changes of the value in the rounds answered now."""
        values = [self.value, *(float(value[0]) for _, _, value in self.results())]
        self.value = values[-1]
        return [pytest.approx(before - after) for before, after in pairwise(values)]

    def round(self, **hyper: float) -> float:
        self.push_ones(**hyper)
        (change,) = self.changes()
        return change


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"name": "pickle"}, "no server optimizer is called 'pickle'"),
        ({"params": {"learning_rate": float("nan")}}, "learning_rate of sgd must be a finite number"),
        ({"params": {"momentum": "0.9"}}, "momentum of sgd must be a number"),
        ({"schedule": ("own", {})}, "no learning-rate schedule is called 'own'"),
        ({"schedule": ("poly", {**POLY[1], "power": float("inf")})}, "power of the schedule poly must be"),
        ({"multipliers": [[4, {"lr_mult": float("nan")}]]}, "lr_mult of sgd must be"),
        ({"multipliers": [[4, {"beta": 1.0}]]}, "no hyper-parameter 'beta'"),
        ({"serial": -1}, "serial number -1"),
        ({"serial": 2**40}, "serial number"),
        ({"hold": True}, "a worker that trains cannot hold"),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(body: dict[str, Any], words: str) -> None:
    root = Root()
    with pytest.raises(InvalidSettings, match=words):
        root.ask(**body)
    assert root.rounds.optimizer is None and root.members.initializing() == [CENTRAL]


@pytest.mark.parametrize(
    "body",
    [
        {"schedule": ("poly",)}, {"multipliers": [4]}, {"params": 3}, {"serial": "x"},
        {"serial": 1, "by_round": [["x", 1]]},
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused(body: dict[str, Any]) -> None:
    root = Root()
    with pytest.raises((TypeError, ValueError)):
        root.ask(**body)
    assert root.rounds.optimizer is None and not root.service._wishes


def test_all_who_ask_must_ask_alike() -> None:
    root = Root()
    root.ask(CENTRAL, by="master", schedule=POLY)
    root.ask(params={"learning_rate": 0.5})
    root.ask(CENTRAL, by="master", schedule=POLY)
    with pytest.raises(InvalidSettings, match=r"B asks for the optimizer nag \{\}, but A has set sgd"):
        root.ask(by="B", name="nag")
    assert root.round() == 0.5, "who trains goes before the master"
    root.ask(serial=1, params={"learning_rate": 0.25})
    root.ask(by="B", serial=1, params={"learning_rate": 0.25})
    with pytest.raises(InvalidSettings, match=r"sgd with learning_rate 0\.75, but A .* learning_rate 0\.25 \("):
        root.ask(by="B", serial=1, params={"learning_rate": 0.75})
    assert [root.round(), root.round(**{SERIAL: 1.0}), root.round()] == [0.5, 0.25, 0.25]


def test_a_number_that_follows_from_the_size_of_the_party() -> None:
    """The message names it alone, and the hint says which number of workers is the same everywhere."""
    for workers, hint in ((1, "all workers that"), (2, "kv.num_workers differs between parties, .*kv.num_all_workers")):
        root = Root()
        other = MemberLink("global")
        other.hello = {"rank": 1, "plane": "global", "workers": workers}
        root.members.arrive(other)  # type: ignore[arg-type]
        common = {"learning_rate": 0.5, "momentum": 0.75}
        root.ask(params={**common, "rescale_grad": 1 / 128})
        with pytest.raises(InvalidSettings) as caught:
            root.ask(1, by="B", params={**common, "rescale_grad": 1 / 64})
        what = "B asks for the optimizer sgd with rescale_grad 0.015625, but A has set sgd with rescale_grad 0.0078125"
        assert caught.value.message == what
        assert re.match(hint, caught.value.hint)


def test_a_master_holds_the_rounds_until_it_has_asked() -> None:
    root = Root()
    root.ask(CENTRAL, by="master", schedule=POLY, multipliers=[[0, {"lr_mult": 2.0}]])
    assert [root.round(), root.round()] == [1.8, 1.6], "by the number of updates"
    assert root.ask(CENTRAL, by="master", hold=True) == {"closed": [(0, 2)]}
    root.push_ones()
    assert root.changes() == []
    with pytest.raises(InvalidSettings):
        root.ask(CENTRAL, by="master", serial=1, params={"momentum": 1.0})
    assert root.changes() == [1.4], "a mistake holds nobody"
    assert root.ask(CENTRAL, by="master", hold=True) == {"closed": [(0, 3)]}
    root.push_ones()
    root.ask(CENTRAL, by="master", serial=2, params={"learning_rate": 0.25}, by_round=[[0, 5]])
    assert [*root.changes(), root.round()] == [1.2, 0.25], "another root has closed round 4"


def test_an_optimizer_on_the_workers_needs_all_of_them() -> None:
    root = Root()
    with pytest.raises(InvalidSettings, match="train asynchronously need one there"):
        Root(asynchronous=True).ask(name="", kind="Test")
    root.ask(CENTRAL, by="master", name="", kind="Test")
    with pytest.raises(InvalidSettings, match="the optimizer Test cannot run on the servers, and only 0 of 1"):
        root.push_ones()
    root = Root()
    root.ask(CENTRAL, by="master", name="", kind="Test")
    root.ask(name="", kind="Test")
    assert root.round() == -1.0, "the sum itself"
    for name, kind in (("sgd", ""), ("", "LAMB")):
        with pytest.raises(InvalidSettings, match="but master has set Test, which runs on the workers"):
            root.ask(by="B", name=name, kind=kind)
    with pytest.raises(InvalidSettings, match="training has begun"):
        root.ask(CENTRAL, by="master", name="", kind="Test")
