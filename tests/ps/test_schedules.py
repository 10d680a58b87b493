"""Learning-rate schedules as the servers follow them, against MXNet's own, number by number."""

import copy
import json
from typing import Any

import numpy as np
import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.optim import optimizers, schedules
from geomx_cli.runtime.frontends.mxnet.script_optimizer import from_mxnet, schedule_of

UPDATES = 400
WARM = {"warmup_steps": 23, "warmup_begin_lr": 0.003}
CASES = [
    ("FactorScheduler", {"step": 7, "factor": 0.9, "base_lr": 0.3}),
    ("FactorScheduler", {"step": 1, "factor": 0.93, "base_lr": 0.3, "stop_factor_lr": 1e-4}),
    ("FactorScheduler", {"step": 2.5, "factor": 0.93, "base_lr": 0.3, **WARM}),
    ("FactorScheduler", {"step": 3, "base_lr": 0.3}),
    ("FactorScheduler", {"step": 10, "factor": 0.7, "base_lr": 1e-9}),
    ("MultiFactorScheduler", {"step": [5, 6, 100, 399], "factor": 0.3, "base_lr": 0.1}),
    ("MultiFactorScheduler", {"step": [50, 60], "factor": 0.3, "base_lr": 0.1, **WARM, "warmup_mode": "constant"}),
    ("PolyScheduler", {"max_update": 300, "base_lr": 0.17}),
    ("PolyScheduler", {"max_update": 300, "base_lr": 0.17, "pwr": 0.9, "final_lr": 0.001, **WARM}),
    ("PolyScheduler", {"max_update": 11, "base_lr": 0.17, **WARM}),
    ("CosineScheduler", {"max_update": 350, "base_lr": 0.17}),
    ("CosineScheduler", {"max_update": 350, "base_lr": 0.17, "final_lr": 0.01, **WARM}),
]


def travelled(scheduler: Any) -> schedules.Schedule:
    """The server's schedule for an MXNet scheduler, sent as JSON."""
    found = schedule_of(scheduler)
    assert found is not None
    name, params = json.loads(json.dumps(found))
    return schedules.create(name, params)


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_every_rate_is_that_of_mxnet(mx: Any, kind: str, params: dict[str, Any]) -> None:
    theirs = getattr(mx.lr_scheduler, kind)(**params)
    ours = travelled(theirs)
    wanted = [theirs(update) for update in range(1, UPDATES)]
    assert [ours.rate(update) for update in range(1, UPDATES)] == wanted
    assert [ours.rate(update) for update in reversed(range(1, UPDATES))] == wanted[::-1], "slices are at any number"


@pytest.mark.parametrize(("kind", "params"), CASES)
def test_a_scheduler_travels_as_it_is_by_now(mx: Any, kind: str, params: dict[str, Any]) -> None:
    """Reading the optimizer's rate advances a scheduler of MXNet's, and setting that rate changes it."""
    theirs = getattr(mx.lr_scheduler, kind)(**params)
    optimizer = mx.optimizer.SGD(learning_rate=0.4, lr_scheduler=theirs)
    theirs(60)
    ours, later = travelled(theirs), copy.deepcopy(theirs)
    assert optimizer.lr_scheduler is theirs
    assert [ours.rate(update) for update in range(61, UPDATES)] == [later(update) for update in range(61, UPDATES)]


def test_a_server_trains_as_mxnet_with_its_scheduler(mx: Any) -> None:
    grads = list(np.random.default_rng(1).standard_normal((60, 50), dtype=np.float32))
    for name, params in (("sgd", {"momentum": 0.9, "wd": 0.01}), ("adam", {})):
        scheduler = mx.lr_scheduler.MultiFactorScheduler([9, 30], 0.5, base_lr=0.05, warmup_steps=4)
        theirs = mx.optimizer.create(name, learning_rate=0.05, lr_scheduler=scheduler, **params)
        ours = optimizers.create(*from_mxnet(theirs), travelled(scheduler))
        updater, held = mx.optimizer.get_updater(theirs), mx.nd.ones(50)
        weight, state = np.ones(50, np.float32), dict[str, Array]()
        for grad in grads:
            updater(0, mx.nd.array(grad), held)
            weight = ours.update(state, weight, grad)
        np.testing.assert_allclose(weight, held.asnumpy(), rtol=1e-5, atol=1e-6)


def test_what_is_told_of_a_slice_goes_before_what_was_set() -> None:
    """Rate and multipliers apply to the next update only; a given rate ends the schedule."""
    schedule = schedules.create("poly", {**GOOD["poly"], "base_lr_orig": 1.0, "max_update": 10.0})
    optimizer, grad = optimizers.create("sgd", {"wd": 0.5}, schedule), np.ones(1)
    rates, state = [], dict[str, Array]()
    told = ({}, {"learning_rate": 0.25}, {"lr_mult": 2.0, "wd_mult": 0.0}, {"learning_rate": 1.0, "lr_mult": 3.0})
    for hyper in told:
        optimizer.tune(hyper)
        rates.append(-optimizer.update(state, np.zeros(1), grad)[0])
    assert rates == [0.81, 0.25, 2 * (1 - 3 / 10) ** 2, 3.0]
    optimizer.tune({"wd_mult": 3.0, "learning_rate": 1.0})
    assert optimizer.update(state, np.full(1, 2.0), np.zeros(1)) == 2.0 - 3.0 * 0.5 * 2.0
    for wrong in ({"lr_mult": float("nan")}, {"wd_mult": True}, {"beta1": 0.5}, {"optimizer": 1.0}):
        with pytest.raises(InvalidSettings, match=r"of sgd must be|has no hyper-parameter"):
            optimizer.tune(wrong)


GOOD: dict[str, dict[str, Any]] = {
    name: {key: field.default for key, field in kind.fields.items()} for name, kind in schedules.SCHEDULES.items()
}
GOOD["multifactor"]["steps"] = [1, 2]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("step", {}, "no learning-rate schedule is called 'step'"),
        ("factor", {"step": 0.5}, "step of the schedule factor must be a finite number of 1 or more"),
        ("factor", {"factor": 1.5}, "factor of the schedule factor"),
        ("factor", {"base_lr": float("nan")}, "base_lr of the schedule factor must be a finite number"),
        ("factor", {"base_lr": "0.1"}, "base_lr of the schedule factor must be a number"),
        ("factor", {"power": 2.0}, "unknown or missing numbers: power"),
        ("multifactor", {"steps": [3, 3]}, "must rise"),
        ("multifactor", {"steps": [1] * 5000}, "at most 4096"),
        ("multifactor", {"steps": 3}, "must be a list"),
        ("multifactor", {"steps": ["x"]}, "must be a number"),
        ("poly", {"power": -1.0}, "power of the schedule poly"),
        ("cosine", {"max_update": 5.0, "warmup_steps": 5.0}, "must differ from its warmup_steps"),
        ("cosine", {"warmup_constant": 1}, "must be true or false"),
    ],
)
def test_wrong_schedules_are_refused(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        schedules.create(name, {**GOOD.get(name, {}), **change})


def test_a_schedule_of_ones_own_cannot_travel(mx: Any) -> None:
    own = type("FactorScheduler", (mx.lr_scheduler.FactorScheduler,), {})
    assert schedule_of(own(3)) is None and schedule_of(lambda update: 0.1) is None
    assert schedules.create(*schedule_of(mx.lr_scheduler.FactorScheduler(3)) or ("", {})).rate(1) == 0.01


def test_a_rate_costs_little_after_any_number_of_updates() -> None:
    """A state that claims update 2^60 does not keep a server busy."""
    schedule = schedules.create("factor", {**GOOD["factor"], "factor": 1 - 1e-12, "stop_factor_lr": 0.0})
    assert 0 < schedule.rate(2**60) < 0.01
