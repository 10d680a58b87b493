"""Delay compensation against its formulas in numpy, MXNet's own DCASGD, and plain SGD without delay."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from optimizing import Optimizing, create

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import defaults
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.algorithms import fsa
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.training.train_config import TrainConfig

SLOT = (3, 1)
NAMES = ("dcasgd", "dcasgd-a", "dcasgd-mxnet")
REGULARISED = {"wd": 0.01, "clip_gradient": 0.7, "rescale_grad": 0.5}
# A late member, one that joins in the middle, and one that contributes twice in a row.
TURNS = (0, 1, 1, 0, 2, 0, 0, 2, 1, 0)


def arrays(*, count: int, size: int, dtype: Any = np.float32) -> list[Array]:
    rng = np.random.default_rng(11)
    return [rng.standard_normal(size).astype(dtype) for _ in range(count)]


def walk(
    optimizer: Optimizing, weight: Array, grads: Sequence[Array], turns: Sequence[int], slot: tuple[int, int] = SLOT
) -> Array:
    for grad, member in zip(grads, turns, strict=True):
        weight = optimizer.update(slot, weight, grad, member=member)
    return weight


def reference(name: str, params: Mapping[str, float], weight: Array, grads: Sequence[Array]) -> Array:
    """The paper's formulas in fp64; `TURNS` assigns the gradients to members."""
    p = {"wd": 0.0, "rescale_grad": 1.0, "clip_gradient": np.inf, "momentum": 0.0, "decay": 0.95, **params}
    w, velocity = weight.astype(np.float64), np.zeros(weight.size)
    backup, square = dict.fromkeys(TURNS, w), dict.fromkeys(TURNS, np.zeros(weight.size))
    for member, grad in zip(TURNS, grads, strict=False):
        g = np.clip(p["rescale_grad"] * grad.astype(np.float64), -p["clip_gradient"], p["clip_gradient"])
        strength: Any = p["lamda"]
        if name == "dcasgd-a":
            square[member] = p["decay"] * square[member] + (1 - p["decay"]) * g**2
            strength = p["lamda"] / np.sqrt(square[member] + 1e-7)
        drift = w - backup[member]
        velocity = p["momentum"] * velocity - p["learning_rate"] * (g + p["wd"] * w + strength * g**2 * drift)
        if name == "dcasgd-mxnet":
            backup = dict.fromkeys(TURNS, w)
        w = w + velocity
        if name != "dcasgd-mxnet":
            backup[member] = w
    return w


@pytest.fixture(scope="module")
def mx() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_mxnet()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 3e-6)])
@pytest.mark.parametrize("momentum", [0.0, 0.8])
@pytest.mark.parametrize("common", [{}, REGULARISED], ids=["plain", "regularised"])
@pytest.mark.parametrize("name", NAMES)
def test_interleaved_members_follow_the_formula(
    name: str, common: dict[str, float], momentum: float, dtype: type, tolerance: float
) -> None:
    params = {"learning_rate": 0.1, "momentum": momentum, "lamda": 0.5, **common}
    params |= {"decay": 0.9} if name == "dcasgd-a" else {}
    weight, *grads = arrays(count=len(TURNS) + 1, size=1000, dtype=dtype)
    mine = walk(create(name, params), weight, grads, TURNS)
    np.testing.assert_allclose(mine, reference(name, params, weight, grads), rtol=tolerance, atol=tolerance)
    assert mine.dtype == dtype
    assert not np.allclose(mine, walk(create(name, {**params, "lamda": 0.0}), weight, grads, TURNS), atol=1e-3)


def test_a_single_step_in_numbers() -> None:
    """w = 1, seen as 0.8, g = 0.5, lr = 0.1: the step is -0.1 (0.5 + 0.04 0.25 0.2) = -0.0502."""
    late = create("dcasgd", {"learning_rate": 0.1})
    late.update(SLOT, np.array([0.8]), np.array([-2.0]), member=0)
    np.testing.assert_allclose(late.update(SLOT, np.array([1.0]), np.array([0.5]), member=1), 1 - 0.0502, rtol=1e-14)

    adaptive = create("dcasgd-a", {"learning_rate": 0.1})
    adaptive.update(SLOT, np.array([0.8]), np.array([-2.0]), member=0)
    strength = 2 / np.sqrt(0.05 * 0.25 + 1e-7)
    new = adaptive.update(SLOT, np.array([1.0]), np.array([0.5]), member=1)
    np.testing.assert_allclose(new, 1 - 0.1 * (0.5 + strength * 0.25 * 0.2), rtol=1e-14)

    parity = create("dcasgd-mxnet", {"learning_rate": 0.1})
    parity.update(SLOT, np.array([0.8]), np.array([-2.0]), member=1)
    np.testing.assert_allclose(parity.update(SLOT, np.array([1.0]), np.array([0.5]), member=1), 1 - 0.0502, rtol=1e-14)


@pytest.mark.parametrize("own", [{}, {"lamda": 3.0}])
@pytest.mark.parametrize("common", [{}, REGULARISED], ids=["plain", "regularised"])
def test_dcasgd_mxnet_has_the_bits_of_mxnet(mx: Any, common: dict[str, float], own: dict[str, float]) -> None:
    params = {"learning_rate": 0.1, **common, **own}
    ours, theirs = create("dcasgd-mxnet", params), mx.optimizer.DCASGD(**params)
    updater, held = mx.optimizer.get_updater(theirs), None
    mine, *grads = arrays(count=9, size=40_000)
    held = mx.nd.array(mine)
    for step, grad in enumerate(grads):
        if step == 4:
            ours.set(learning_rate=0.03)
            theirs.set_learning_rate(0.03)
        mine = ours.update(SLOT, mine, grad, member=step % 2)
        updater(0, mx.nd.array(grad), held)
        assert mine.tobytes() == held.asnumpy().tobytes()


@pytest.mark.parametrize("name", ["dcasgd", "dcasgd-a"])
@pytest.mark.parametrize("own", [{}, {"momentum": 0.9}, {"momentum": 0.9, **REGULARISED}])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_member_is_plain_sgd(name: str, own: dict[str, float], dtype: type) -> None:
    params = {"learning_rate": 0.1, **own}
    weight, *grads = arrays(count=8, size=500, dtype=dtype)
    alone = walk(create(name, params), weight, grads, [4] * 7)
    plain = walk(create("sgd", params), weight, grads, [0] * 7)
    np.testing.assert_allclose(alone, plain, rtol=1e-3 if dtype == np.float16 else 1e-6, atol=1e-6)
    assert "wd" in own or np.array_equal(alone, plain)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_slicing_changes_no_bit(name: str, dtype: type) -> None:
    params = {"momentum": 0.9, **REGULARISED, "learning_rate": 0.1}
    weight, *grads = arrays(count=7, size=70_001, dtype=dtype)
    whole = walk(create(name, params), weight, grads, TURNS[:6])
    sliced, bounds = create(name, params), (0, 13, 33_001, 70_001)
    pieces = [
        walk(sliced, weight[low:high], [grad[low:high] for grad in grads], TURNS[:6], (0, index))
        for index, (low, high) in enumerate(pairwise(bounds))
    ]
    assert np.concatenate(pieces).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_fp16_goes_on_in_fp32_and_never_writes_to_its_arguments(name: str) -> None:
    params = {"learning_rate": 0.1, "momentum": 0.5, "lamda": 0.5}
    weight, *grads = (np.frombuffer(a.tobytes(), a.dtype) for a in arrays(count=11, size=300, dtype=np.float16))
    mine = walk(create(name, params), weight, grads, TURNS)
    exact = walk(create(name, params), weight.astype(np.float32), [g.astype(np.float32) for g in grads], TURNS)
    assert np.array_equal(mine, exact.astype(np.float16))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("name", NAMES)
def test_state_comes_back_exactly(name: str, dtype: type) -> None:
    first = create(name, {"momentum": 0.9, "learning_rate": 0.1})
    weight, *grads = arrays(count=len(TURNS) + 1, size=50, dtype=dtype)
    middle = walk(first, weight, grads[:4], TURNS[:4])  # member 2 has not contributed yet
    walk(first, weight, grads[:1], [10], (12, 0))
    state = first.export_state()
    for array in state.values():
        array.flags.writeable = False
    second = create(first.name, first.params)
    second.import_state(state)
    again = second.export_state()
    assert list(again) == list(state)
    assert all(again[what].dtype == array.dtype for what, array in state.items())
    ends = [walk(optimizer, middle, grads[4:], TURNS[4:]) for optimizer in (first, second)]
    assert ends[0].tobytes() == ends[1].tobytes()
    assert {n: a.tobytes() for n, a in again.items()} == {n: a.tobytes() for n, a in state.items()}


def test_state_is_named_by_member() -> None:
    optimizer = create("dcasgd-a", {"momentum": 0.9})
    for member in (0, 12):
        optimizer.update(SLOT, np.ones((2, 3), np.float16), np.ones((2, 3), np.float16), member=member)
    own = ("backup.0", "square.0", "backup.12", "square.12")
    assert set(optimizer.export_state()) == {f"3/1/{what}" for what in ("step", "master", "initial", "momentum", *own)}
    optimizer.set(momentum=0.0)
    optimizer.update(SLOT, np.ones((2, 3), np.float16), np.ones((2, 3), np.float16), member=12)
    assert set(optimizer.export_state()) == {f"3/1/{what}" for what in ("step", "master", "initial", *own)}


ZEROS = np.zeros(4, np.float32)
GOOD = {"0/0/step": np.array([2]), "0/0/initial": ZEROS, "0/0/backup.1": ZEROS, "0/0/square.1": ZEROS}


@pytest.mark.parametrize(
    "change",
    [
        {"0/0/initial": None},
        {"0/0/square.1": None},
        {"0/0/square": ZEROS},
        {"0/0/initial.1": ZEROS},
        {"0/0/step.1": np.array([2])},
        {"0/0/backup.2": ZEROS},
        {"0/0/backup.02": ZEROS, "0/0/square.02": ZEROS},
        {"0/0/backup.": ZEROS},
        {"0/0/backup.-1": ZEROS, "0/0/square.-1": ZEROS},
        {"0/0/backup.1": np.zeros(5, np.float32)},
    ],
)
def test_foreign_state_is_refused_and_the_old_state_stays(change: dict[str, Array | None]) -> None:
    optimizer = create("dcasgd-a", {})
    optimizer.import_state(GOOD)
    with pytest.raises(InvalidSettings):
        optimizer.import_state({name: array for name, array in {**GOOD, **change}.items() if array is not None})
    assert set(optimizer.export_state()) == set(GOOD)


def test_others_refuse_the_state_of_members() -> None:
    with pytest.raises(InvalidSettings):
        create("sgd", {}).import_state({"0/0/step": np.array([1]), "0/0/momentum.1": ZEROS})


@pytest.mark.parametrize("name", NAMES)
def test_a_forgotten_slot_begins_anew(name: str) -> None:
    optimizer, fresh = (create(name, {"momentum": 0.9, "learning_rate": 0.1}) for _ in range(2))
    weight, *grads = arrays(count=len(TURNS) + 1, size=50)
    walk(optimizer, weight, grads, TURNS)
    optimizer.states[SLOT].clear()
    assert optimizer.export_state() == {}
    again, wanted = (walk(item, 2 * weight, grads, TURNS) for item in (optimizer, fresh))
    assert again.tobytes() == wanted.tobytes()


def test_compensation_is_exact_where_its_hessian_is() -> None:
    """Minimise w²/2, whose gradient is w. Member 1's is from w = 1.5; member 0 has since moved w to 0.9.

    With lamda g² = 1, the Hessian, member 1's step is that of a gradient computed at 0.9.
    """
    optimizer = create("dcasgd", {"learning_rate": 0.5, "lamda": 1 / 1.5**2})
    seen = np.array([1.5])
    moved = optimizer.update(SLOT, seen, np.array([1.2]), member=0)
    np.testing.assert_allclose(moved, 0.9)
    np.testing.assert_allclose(optimizer.update(SLOT, moved, seen, member=1), 0.9 - 0.5 * 0.9)


def recipe(**given: Any) -> TrainConfig:
    values = defaults(plugins.table())
    assert given.keys() <= values.keys()
    return TrainConfig.from_options({**values, **given})


@pytest.mark.parametrize(("spec", "momentum"), [("topk:0.01", 0.9), ("bsc:0.01", 0.0), ("1bit", 0.0)])
@pytest.mark.parametrize("place", ["compress", "compress_lan"])
def test_the_optimizer_has_no_momentum_that_the_codec_does_not_bear(place: str, spec: str, momentum: float) -> None:
    optimizer = fsa.server_optimizer(recipe(**{place: spec}))
    assert optimizer is not None and optimizer[1]["momentum"] == momentum


def test_the_options_reach_the_optimizer() -> None:
    for name in NAMES:
        made = recipe(optimizer=name)
        usual = create(name, {}).params | {"learning_rate": 0.05, "momentum": 0.9}
        assert create(name, made.optimizer_params).params == usual
    asked = {"optimizer": "dcasgd-a", "lr": 0.25, "momentum": 0.0, "dc_lambda": 1.5, "dc_decay": 0.5}
    params = {"learning_rate": 0.25, "momentum": 0.0, "lamda": 1.5, "decay": 0.5}
    assert recipe(**asked).optimizer_params == params
    del params["decay"]
    assert recipe(**{**asked, "optimizer": "dcasgd"}).optimizer_params == params
    assert recipe(dc_lambda=1.5).optimizer_params == {"learning_rate": 0.05, "momentum": 0.9}
