"""What an MXNet script saves between two batches, and goes on from in another process."""

import itertools
import random
import warnings
from typing import Any

import numpy as np
import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.mxnet.iterator_place import observe_shuffles
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.frontends.mxnet.loader_place import place_in
from geomx_cli.runtime.frontends.mxnet.packing import attributes, pack_state, set_attributes, unpack_state
from geomx_cli.runtime.frontends.mxnet.script_objects import check_complete, kept, prepare_trainer
from geomx_cli.runtime.script.random_state import random_state, set_random_state
from geomx_cli.runtime.training.worker_algorithm import State

mx: Any = None
DATA = np.arange(40, dtype=np.float32)


@pytest.fixture(scope="module", autouse=True)
def _mxnet() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        globals()["mx"] = load_mxnet()
    observe_shuffles(mx.io.NDArrayIter)


def loader(**options: Any) -> Any:
    return mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(DATA), 6, **options)


def iterator(**options: Any) -> Any:
    return mx.io.NDArrayIter(DATA, DATA, 6, **options)


class Restless:
    """A batch sampler that draws from Python's random numbers as it goes."""

    def __iter__(self) -> Any:
        return (random.sample(range(40), 4) for _ in range(7))

    def __len__(self) -> int:
        return 7


def drawing() -> Any:
    return [[mx.nd.array([number])] for number in np.random.permutation(9)]


LOADERS = {
    "shuffle": lambda: loader(shuffle=True, last_batch="keep"),
    "rollover": lambda: loader(shuffle=True, last_batch="rollover"),
    "reloaded": lambda: loader(shuffle=True, auto_reload=True),
    "threads": lambda: loader(shuffle=True, num_workers=2, thread_pool=True),
    "restless": lambda: mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(DATA), batch_sampler=Restless()),
    "iterator": lambda: iterator(shuffle=True),
    "rolling iterator": lambda: iterator(shuffle=True, last_batch_handle="roll_over"),
    "discarding iterator": lambda: iterator(shuffle=True, last_batch_handle="discard"),
    "ordered iterator": iterator,
    "resized": lambda: mx.io.ResizeIter(iterator(), 4),
    "list": drawing,
}  # fmt: skip


def begin(kind: str) -> Any:
    np.random.seed(5)
    random.seed(6)
    return LOADERS[kind]()


def passes(given: Any, count: int, start: int = 0, found: "tuple[State, State] | None" = None, stop: int = -1) -> Any:
    """What passes give, and random numbers drawn between; or, at `stop`, the place and the random state."""
    seen: list[Any] = []
    for number in range(count):
        if number and hasattr(given, "reset"):
            given.reset()
        place, done, batches = place_in(given), 0, None
        if found is not None and number == 0:
            place.load(found[0], start)
            done = start
            batches = place.begin() if start else None
            set_random_state(found[1])
        while True:
            if len(seen) == stop:
                return seen, done, State.from_bytes(place.state().to_bytes()), random_state()
            batches = place.begin() if batches is None else batches
            try:
                batch = next(batches)
            except StopIteration:
                break
            values = batch.data if isinstance(batch, mx.io.DataBatch) else batch
            values = values[0] if isinstance(values, list) else values
            seen.append((values.asnumpy().reshape(-1).tolist(), np.random.rand(), random.random()))
            place.advance()
            done += 1
    return seen


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "shuffle" else pytest.mark.thorough) for kind in LOADERS]
)
def test_a_pass_goes_on_at_its_place(kind: str) -> None:
    whole = passes(begin(kind), 3)
    lengths = [len(passes(begin(kind), count)) for count in (1, 2)]
    for stop in (0, 2, lengths[0] - 1, lengths[0], lengths[0] + 2, lengths[1] + 1):
        seen, done, place, random_numbers = passes(begin(kind), 3, stop=stop)
        begun = sum(len(seen) - done >= length for length in lengths)
        other = begin(kind) if kind == "list" else LOADERS[kind]()
        np.random.rand(3)
        assert seen + passes(other, 3 - begun, done, (place, random_numbers)) == whole, stop


def test_iterators_ahead_of_one_that_shuffles_are_refused() -> None:
    with pytest.raises(InvalidSettings, match="a ResizeIter of an iterator that shuffles"):
        place_in(mx.io.ResizeIter(iterator(shuffle=True), 4))


class Steps:
    """Training of a small network with a gluon Trainer alone: dropout, running means, gradients that add up."""

    def __init__(self, optimizer: Any) -> None:
        self.net = mx.gluon.nn.HybridSequential()
        self.net.add(
            mx.gluon.nn.Dense(8, in_units=5), mx.gluon.nn.BatchNorm(in_channels=8), mx.gluon.nn.Dropout(0.3),
            mx.gluon.nn.Dense(1, in_units=8),
        )  # fmt: skip
        self.net.initialize(mx.init.Xavier())
        self.net[0].weight.grad_req = "add"
        self.trainer = mx.gluon.Trainer(self.net.collect_params(), optimizer, kvstore=None)
        prepare_trainer(self.trainer)

    def run(self, first: int, last: int) -> list[Any]:
        for step in range(first, last):
            mx.random.seed(step + 1)
            images = mx.nd.random.normal(shape=(6, 5))
            with mx.autograd.record():
                loss = (self.net(images) ** 2).mean()
            loss.backward()
            if step % 3 == 2:
                self.trainer.step(6)
                self.net[0].weight.zero_grad()
        tensors = [parameter.data().asnumpy().tolist() for parameter in self.net.collect_params().values()]
        return [tensors, self.trainer.learning_rate, self.trainer.optimizer.num_update]


def adam() -> Any:
    return mx.optimizer.Adam(lr_scheduler=mx.lr_scheduler.MultiFactorScheduler([1, 3], 0.5, base_lr=0.1))


@pytest.mark.parametrize("make", [adam, lambda: mx.optimizer.Nadam(0.1), lambda: mx.optimizer.SGD(momentum=0.9)])
def test_a_trainer_goes_on_with_the_same_bits(make: Any) -> None:
    mx.random.seed(1)
    wanted = Steps(make()).run(0, 14)
    mx.random.seed(1)
    former = Steps(make())
    former.run(0, 10)
    found = State()
    for name, each in (("net", former.net), ("trainer", former.trainer)):
        found.add(name, kept(name, each).state())
    found = State.from_bytes(found.to_bytes())
    mx.random.seed(2)
    later = Steps(make())
    for name, each in (("net", later.net), ("trainer", later.trainer)):
        kept(name, each).load(found.part(name))
    assert later.run(10, 14) == wanted


def test_every_optimizer_can_be_saved() -> None:
    for name in sorted(set(mx.optimizer.Optimizer.opt_registry) - {"test", "ccsgd"}):
        _assert_can_be_saved(name)


def _assert_can_be_saved(name: str) -> None:
    updaters = [mx.optimizer.get_updater(mx.optimizer.create(name, learning_rate=0.1)) for _ in range(2)]
    weights = [mx.nd.ones((3, 2)), mx.nd.ones((3, 2))]
    gradients = [mx.nd.array(np.random.RandomState(step).randn(3, 2)) for step in range(4)]

    def step(which: int, gradient: Any) -> Any:
        mx.random.seed(3)  # for SGLD
        updaters[which](0, gradient.copy(), weights[which])
        return weights[which].asnumpy().tolist()

    for gradient in gradients[:2]:
        step(0, gradient)
    found = State.from_bytes(kept("updater", updaters[0]).state().to_bytes())
    weights[1][:] = weights[0]
    wanted = [step(0, gradient) for gradient in gradients[2:]]
    kept("updater", updaters[1]).load(found)
    assert [step(1, gradient) for gradient in gradients[2:]] == wanted, name


def test_arrays_are_written_in_place() -> None:
    arrays = {"first": [mx.nd.ones((2, 3)), np.zeros(4)], "second": mx.nd.zeros(5, dtype="float16")}
    found = State.from_bytes(kept("arrays", arrays).state().to_bytes())
    others = {"first": [mx.nd.zeros((2, 3)), np.ones(4)], "second": mx.nd.ones(5, dtype="float16")}
    kept("arrays", others).load(found)
    assert (others["first"][0].asnumpy() == 1).all() and not others["first"][1].any()
    assert not others["second"].asnumpy().any()  # type: ignore[attr-defined]
    with pytest.raises(InvalidSettings, match=r"arrays\[0\] had the shape \(2, 3\) when it was saved, and now \(3,\)"):
        kept("arrays", [mx.nd.zeros(3)]).load(kept("arrays", [mx.nd.ones((2, 3))]).state())


def test_a_schedule_of_the_script_goes_on() -> None:
    class Warming(mx.lr_scheduler.LRScheduler):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(0.1)
            self.seen: list[int] = []

        def __call__(self, count: int) -> float:
            self.seen.append(count)
            return 0.1 * len(self.seen)

    former, later = (mx.optimizer.SGD(lr_scheduler=Warming()) for _ in range(2))
    for count, optimizer in itertools.product(range(3), [former]):
        optimizer._update_count(0)
        assert optimizer.learning_rate == pytest.approx(0.1 * (count + 1))
    found = pack_state(attributes(former, "optimizer"), "optimizer")
    set_attributes(later, unpack_state(State.from_bytes(found.to_bytes())))
    assert later.lr_scheduler.seen == [1, 2, 3] and later._index_update_count == {0: 3}
    later._update_count(0)
    assert later._all_index_update_counts == {0: {0: 4}}


def test_what_cannot_be_saved_is_refused() -> None:
    dense = mx.gluon.nn.Dense(2)
    dense.initialize()
    with pytest.raises(InvalidSettings, match="net does not know the shape of its parameter weight yet"):
        kept("net", dense)
    rows = mx.gluon.nn.Embedding(5, 2, sparse_grad=True)
    rows.initialize()
    kept("net", rows)
    with pytest.raises(InvalidSettings, match="metric is a Accuracy, which cannot be saved"):
        kept("metric", mx.metric.Accuracy())
    with pytest.raises(InvalidSettings, match="module is not bound yet"):
        kept("module", mx.mod.Module(mx.sym.Variable("data"), label_names=None))
    optimizer = mx.optimizer.SGD()
    optimizer.mine = object()
    with pytest.raises(InvalidSettings, match=r"optimizer\['mine'\]\['value'\] is a builtins.object"):
        kept("optimizer", optimizer)


def test_objects_that_are_missing_are_named() -> None:
    steps, other = Steps("sgd"), Steps("sgd")
    whole = {name: kept(name, each) for name, each in (("net", steps.net), ("trainer", steps.trainer))}
    check_complete(whole)
    with pytest.raises(InvalidSettings, match="has no network, module or arrays"):
        check_complete({"trainer": whole["trainer"]})
    with pytest.raises(InvalidSettings, match="has no Trainer of the parameter"):
        check_complete({"net": whole["net"]})
    with pytest.raises(InvalidSettings, match=r"has no network with the parameter .* of trainer"):
        check_complete({"net": kept("net", other.net), "trainer": whole["trainer"]})
