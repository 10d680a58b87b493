"""Sketches of the models that workers train: mistakes are found in them, and correct scripts are not warned of."""

import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from desk import Desk
from rehearsal import Rehearsal
from torch import nn
from workers import Workers, rehearsed

from geomx_cli.core.futures import finished
from geomx_cli.ps.cluster.bodies import MAX_COMPARED, checked_request
from geomx_cli.ps.model_comparison import SUMS, ModelComparison
from geomx_cli.runtime.frontends.torch import data
from geomx_cli.runtime.frontends.torch.checks import GradientCheck
from geomx_cli.runtime.frontends.torch.ddp.futures import Lane
from geomx_cli.runtime.frontends.torch.local_steps import LocalSynchroniser
from geomx_cli.runtime.frontends.torch.model_watch import CheckTimes, Compared, ModelWatch, comparable, sketch


class Member:
    """A worker of a job in this process: its model, and what it sends. See Watchable."""

    def __init__(self, comparison: ModelComparison, rank: int, workers: int, build: Callable[[int], Any]) -> None:
        torch.manual_seed(1)
        self.model, self.optimizer = build(rank)
        self.passes: int | None = 0
        self.local: dict[str, Any] | None = None  # options of Compared for an algorithm with local steps
        self.watch = ModelWatch()
        self._comparison, self._rank, self._workers = comparison, rank, workers

    def compare(self, row: dict[str, Any]) -> None:
        """See Compared.send."""
        self._comparison.add(checked_request("compare", {**row, "by": f"A/worker:{self._rank}"}))

    def compared(self, optimizer: Any) -> Sequence[Compared]:
        """See Watchable."""
        if self.local is not None:
            return (Compared(self.compare, "all/", self._workers, {}, **self.local),)
        tensors = comparable(self.model, dict(self.model.named_parameters()))
        return (Compared(self.compare, "", self._workers, tensors),)


def train(
    build: Callable[[int], Any], steps: int = 40, workers: int = 2,
    before: Callable[[Member, int, int], None] | None = None,
    exchanges: Callable[[int], bool] = lambda step: True,
) -> list[str]:  # fmt: skip
    """Train together, and return what is said. before: called for each worker and step, before its backward pass."""
    said: list[str] = []
    comparison = ModelComparison(lambda message, hint: said.append(f"{message}; {hint}"), lambda: workers)
    members = [Member(comparison, rank, workers, build) for rank in range(workers)]
    fixed = {id(item) for member in members for item in member.model.parameters() if not item.requires_grad}
    for step in range(1, steps + 1):
        for rank, member in enumerate(members):
            if before is not None:
                before(member, rank, step)
            torch.manual_seed(100 * step + rank)
            member.optimizer.zero_grad()
            member.model(torch.randn(4, 8)).square().mean().backward()
        for same in zip(*(member.model.parameters() for member in members), strict=True):
            if exchanges(step) and id(same[0]) not in fixed and same[0].grad is not None:
                mean = torch.stack([item.grad for item in same]).mean(0)
                for item in same:
                    item.grad = mean.clone()
        for member in members:
            member.passes = (member.passes or 0) + exchanges(step)
            member.watch.before_step(member, member.optimizer)
            member.optimizer.step()
    comparison.close()
    return said


def layers(rank: int, rate: float = 3e-3, kind: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))
    return model, kind(model.parameters(), lr=rate)


def half_frozen(rank: int) -> tuple[Any, Any]:
    model, optimizer = layers(rank)
    model[0].requires_grad_(False)
    return model, optimizer


def unfreeze(member: Member, rank: int, step: int) -> None:
    if step == 10:
        member.model[0].requires_grad_(True)


def copy_back(member: Member, rank: int, step: int) -> None:
    if (rank, step) == (1, 21):
        member.model[3].weight.data.mul_(0.9)


def load_older(member: Member, rank: int, step: int) -> None:
    if (rank, step) == (1, 20):
        older = torch.optim.AdamW(member.model.parameters(), lr=3e-3)
        member.optimizer.load_state_dict(older.state_dict())


def lower_rate(member: Member, rank: int, step: int) -> None:
    if (rank, step) == (1, 12):
        member.optimizer.param_groups[0]["lr"] = 1e-3


def spoil(member: Member, rank: int, step: int) -> None:
    if (rank, step) == (1, 5):
        member.model[3].bias.data[0] = float("nan")


@pytest.mark.parametrize(
    ("build", "before", "said"),
    [
        (half_frozen, unfreeze, ["after 10 steps 0.weight and 0.bias differ", "0.weight was frozen in the first step"]),
        (layers, copy_back, ["after 21 steps 3.weight differs between workers A/worker:0 and A/worker:1"]),
        (layers, load_older, ["differ between", "number of steps is 21 in A/worker:0 and 2 in A/worker:1"]),
        (layers, lower_rate, ["after 12 steps", "lr is 0.003 in A/worker:0 and 0.001 in A/worker:1"]),
        (layers, spoil, ["after 4 steps 3.bias differs", "elements that are not finite in A/worker:1"]),
    ],
    ids=["unfrozen", "copied-back", "older-optimizer", "rate", "nan"],
)
def test_mistakes_are_named(build: Any, before: Any, said: Sequence[str]) -> None:
    """The first tensor, the workers, the step, and where it is known the reason."""
    (found,) = train(build, before=before)
    assert all(part in found for part in said), found


def embedding(rank: int) -> tuple[Any, Any]:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = nn.Embedding(50, 8, max_norm=0.5), nn.Linear(8, 3)

        def forward(self, values: Any) -> Any:
            return self.last(self.table((values * 50).long().abs() % 50))

    model = Lookup()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def frozen_differs(rank: int) -> tuple[Any, Any]:
    model, optimizer = half_frozen(rank)
    model[0].weight.data.add_(rank)
    return model, optimizer


def other_rounding(member: Member, rank: int, step: int) -> None:
    with torch.no_grad():
        for parameter in member.model.parameters():
            parameter.mul_(1 + 1e-7 * rank)


def swap_for_evaluation(member: Member, rank: int, step: int) -> None:
    """One worker evaluates an average of its weights, and goes on with the weights."""
    if rank == 0:
        before = [parameter.clone() for parameter in member.model.parameters()]
        for parameter, own in zip(member.model.parameters(), before, strict=True):
            parameter.data.mul_(0.5)
            parameter.data.copy_(own)


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (layers, {"workers": 3}),
        (lambda rank: layers(rank, kind=torch.optim.SGD, rate=0.1), {"before": other_rounding, "steps": 200}),
        (layers, {"before": swap_for_evaluation}),
        (layers, {"exchanges": lambda step: False}),
        (frozen_differs, {}),
        (embedding, {}),
        (lambda rank: layers(0, kind=lambda given, lr: torch.optim.SGD(
            [{"params": [item], "rank": rank} for item in given], lr=lr)), {}),
    ],
    ids=["batch-norm", "rounding", "swapped", "local-steps", "frozen", "max-norm", "own-settings"],
)  # fmt: skip
def test_correct_scripts_are_not_warned_of(build: Any, options: dict[str, Any]) -> None:
    """Buffers, frozen tensors, local steps, rounding and rows that a forward pass normalises may differ."""
    assert train(build, **options) == []


def as_local_steps(**options: Callable[[int], Any]) -> Callable[[Member, int, int], None]:
    """Hyper-parameters are compared, and no tensors; options of Compared by rank."""

    def before(member: Member, rank: int, step: int) -> None:
        member.local = {"in_step": True, **{name: value(rank) for name, value in options.items()}}

    return before


def at_step(change: Callable[[Member, int], None], first: int = 50) -> Callable[[Member, int, int], None]:
    """Hyper-parameters of local steps, of which the second worker changes some in this step."""

    def before(member: Member, rank: int, step: int) -> None:
        member.local = {"in_step": True}
        if rank == 1 and step >= first:
            change(member, step)

    return before


def lower(member: Member, step: int) -> None:
    member.optimizer.param_groups[0]["lr"] = 1e-3


def decay(member: Member, step: int) -> None:
    member.optimizer.param_groups[0]["weight_decay"] = 0.5


def adapt(member: Member, step: int) -> None:
    member.optimizer.param_groups[0]["eps"] = 1e-8 * step


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lower, "in step 56 lr is 0.003 in A/worker:0 and 0.001 in A/worker:1"),
        (decay, "in step 56 weight_decay is 0.01 in A/worker:0 and 0.5 in A/worker:1"),
        (adapt, ""),
    ],
    ids=["rate", "decay", "of-the-optimizer"],
)
def test_hyper_parameters_that_one_worker_changes_during_local_steps(change: Any, said: str) -> None:
    """Not numbers that an optimizer may keep among them, as Prodigy's estimate."""
    found = train(layers, before=at_step(change), steps=70)
    assert len(found) == bool(said) and said in "".join(found)


def with_betas(rank: int) -> tuple[Any, Any]:
    return layers(rank, kind=lambda given, lr: torch.optim.AdamW(given, lr=lr, betas=(0.9, 0.999 - 0.009 * rank)))


def with_groups(rank: int) -> tuple[Any, Any]:
    return layers(
        rank, kind=lambda given, lr: torch.optim.SGD([{"params": [item], "lr": lr + rank * (item.ndim - 1) / 2}
                                                      for item in given], lr=lr),
    )  # fmt: skip


def with_own_entries(rank: int) -> tuple[Any, Any]:
    return layers(
        rank, kind=lambda given, lr: torch.optim.SGD([{"params": given, "rank": rank}], lr=lr),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "before", "said"),
    [
        (lambda rank: layers(rank, 3e-3 / (1 + rank)), as_local_steps(), "in step 1 lr is 0.003 in A/worker:0"),
        (with_betas, as_local_steps(), "betas[1] is 0.999 in A/worker:0 and 0.99 in A/worker:1"),
        (with_groups, as_local_steps(), "lr of group 0 is 0.003 in A/worker:0 and 0.503 in A/worker:1"),
        (layers, as_local_steps(scale=lambda rank: 8.0 / (1 + rank)), "the scale of its GradScaler is 8 in A/worker:0"),
        (layers, as_local_steps(), ""),
        (with_own_entries, as_local_steps(), ""),
        (lambda rank: layers(rank, 3e-3 / (1 + rank)), as_local_steps(epoch=lambda rank: 10 + rank), "in step 2 lr is"),
        (layers, as_local_steps(in_step=lambda rank: not rank, scale=lambda rank: 8.0 / (1 + rank)), ""),
    ],
    ids=["rate", "betas", "groups", "scale", "alike", "own-entries", "other-data", "skipped-step"],
)  # fmt: skip
def test_hyper_parameters_of_local_steps(build: Any, before: Any, said: str) -> None:
    """In the first step; not what a script keeps in the groups, nor scales of which one worker has skipped a step."""
    found = train(build, before=before, steps=5)
    assert len(found) == bool(said) and said in "".join(found)


def test_a_schedule_that_lags_in_a_worker_that_has_skipped_a_step_is_no_difference() -> None:
    """It is compared while no worker has; what it begins with always is."""

    def said(*, is_told: bool = False, other: float = 0.0) -> str:
        def before(member: Member, rank: int, step: int) -> None:
            member.local = {"in_step": is_told or not rank, "epoch": 100}
            first = 0.1 + other * rank
            member.optimizer.param_groups[0].update(initial_lr=first, lr=first * (step + rank) / 10)

        return "".join(train(layers, before=before, steps=5))

    assert said() == ""
    assert "in step 1 lr is 0.01 in A/worker:0 and 0.02 in A/worker:1" in said(is_told=True)
    assert "in step 1 initial_lr is 0.1 in A/worker:0 and 1.1 in A/worker:1" in said(other=1.0)


def test_schedules_for_data_of_other_lengths_are_no_difference() -> None:
    schedules: dict[int, Any] = {}

    def build(rank: int) -> tuple[Any, Any]:
        model, optimizer = layers(rank)
        schedules[rank] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20 + rank)
        return model, optimizer

    def before(member: Member, rank: int, step: int) -> None:
        member.local = {"in_step": True}
        if step > 1:
            schedules[rank].step()

    assert train(build, before=before, steps=20) == []


@pytest.mark.parametrize(
    ("rate", "lengths"),
    [
        (lambda step, length: min(1.0, step / (10 * length)), (10, 20)),
        (lambda step, length: min(1.0, step / (10 * length)), (0, 0)),
        (lambda step, length: 0.1 ** (step // length), (20, 40)),
        (lambda step, length: 1.0 if step < length else 0.5 * 0.9**step, (20, 40)),
    ],
    ids=["warm-up", "warm-up-of-unknown", "epochs", "by-hand"],
)
def test_schedules_of_workers_with_twice_as_many_batches(rate: Any, lengths: tuple[int, int]) -> None:
    """lengths: of an epoch; where they are unknown, a schedule of PyTorch has noted the first rate."""

    def before(member: Member, rank: int, step: int) -> None:
        member.local = {"in_step": True, "epoch": lengths[rank]}
        (group,) = member.optimizer.param_groups
        group["lr"] = 0.1 * rate(step, lengths[rank] or 10 * (1 + rank))
        group.update({} if lengths[rank] else {"initial_lr": 0.1})

    assert "".join(train(layers, before=before, steps=60)) == ""


@pytest.mark.parametrize("epoch", [0, 100], ids=["unknown", "known"])
def test_a_schedule_that_one_worker_has_resumed_elsewhere(epoch: int) -> None:
    """Both rates fall by the same factor, at other steps."""

    def before(member: Member, rank: int, step: int) -> None:
        member.local = {"in_step": True, "epoch": epoch}
        member.optimizer.param_groups[0].update(initial_lr=0.1, lr=0.1 * 0.1 ** ((step + 8 * rank) // 32))

    (said,) = train(layers, before=before, steps=40)
    assert "in step 26 lr is 0.1 in A/worker:0 and 0.01 in A/worker:1" in said


def test_a_worker_with_more_batches_in_an_epoch_is_late_with_its_schedule() -> None:
    def before(member: Member, rank: int, step: int) -> None:
        member.local = {"in_step": True}
        member.optimizer.param_groups[0].update(initial_lr=0.1, lr=0.1 * 0.3 ** (step // (20 + rank)))

    assert train(layers, before=before, steps=100) == []


def test_batches_of_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the DataLoader that gave the last batch counts them; unknown of a stream."""
    from torch.utils.data import DataLoader, IterableDataset, dataloader

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    iterators: Any = dataloader._BaseDataLoaderIter
    monkeypatch.setattr(iterators, "__next__", iterators.__next__)
    data.follow_loaders.__wrapped__(iterators)
    for samples, length in (([0] * 10, 4), (Stream(), 0)):
        iterator = iter(DataLoader(samples, batch_size=3))  # type: ignore[arg-type, unused-ignore]
        next(iterator)
        assert data.batches_in_epoch() == length


def test_a_scaler_that_another_optimizer_has_lowered() -> None:
    """A worker lowers the scale alone, after gradients of any optimizer: what it began with is compared."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    first, second = (torch.optim.SGD([weight], lr=0.1) for weight in weights)
    scaler.scale(weights[0].sum() * float("inf") + weights[1].sum()).backward()
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    own: Any = SimpleNamespace(scaler=scaler)
    assert (scaler.get_scale(), LocalSynchroniser.scale(own)) == (4.0, 8.0)


@pytest.mark.parametrize("at_fault", [True, False])
def test_gradients_that_are_not_finite_in_the_first_of_two_passes_before_a_step(at_fault: bool) -> None:
    """As in DistributedDataParallel: all workers' later gradients contain its mean. The one that began it is named."""
    said: list[str] = []
    weight = nn.Parameter(torch.ones(3))
    check = GradientCheck(said.append, {"weight": weight})
    check._parameter = None  # as of buckets
    spoiled = torch.full((3,), float("nan"))
    for pass_ in (1, 2):
        check.begin_pass()
        check.contributes(None, spoiled if at_fault or pass_ == 2 else torch.ones(3), pass_)
        weight.grad = spoiled.clone()
        check.received(None, spoiled)
    with torch.no_grad():
        weight -= spoiled
    check.begin_pass()
    assert ["step 1" in message for message in said] == [True] * at_fault


def test_a_step_that_is_skipped_clears_suspicions() -> None:
    """Gradients that are gone by the next pass have spoiled nothing; other ones of later passes are looked at."""
    said: list[str] = []
    weight = nn.Parameter(torch.ones(3))
    check = GradientCheck(said.append, {"weight": weight})
    for spoils in (True, False):
        check.begin_pass()
        gradient = torch.full((3,), float("inf") if spoils else 1.0)
        check.contributes(weight, gradient, 1)
        check.received(weight, torch.full((3,), float("inf")))
        weight.grad = None  # GradScaler skips the step, and the script zeroes the gradients
    with torch.no_grad():
        weight *= float("nan")
    check.begin_pass()
    assert said == []


def test_who_waits_for_callbacks_takes_part_in_rounds() -> None:
    """A callback may wait for a worker that waits for this one in a round; also for the callbacks of a callback's call.
    """
    freed: list[Future[None]] = []

    def take_part(over: "Future[Any]") -> None:
        for each in freed:
            if not each.done():
                each.set_result(None)

    script = Lane("", "own", take_part)
    operation = script.next()
    for lane in (operation, operation.next()):
        freed.append(waited := Future())
        lane.run(finished(None), lambda waited=waited: waited.result(2))  # type: ignore[misc]
    for _ in range(8):  # until the name of the first operation comes again
        script.next()
    assert operation.wait() is None


def test_times_meet_and_cost_little() -> None:
    """Workers with other clocks choose common steps; the first ones, then at most every half minute."""
    chosen = []
    for taken in (0.07, 0.11):
        now = [0.0]
        times = CheckTimes(lambda now=now: now[0])  # type: ignore[misc]
        steps, spent = set(), 0.0
        for step in range(1, 20_001):
            if times.begin_step():
                steps.add(step)
                times.took(0.02)
                spent += 0.02
            now[0] += taken
        last = sorted(steps)[-3:]
        assert spent < 0.005 * now[0] and {1, 2, 3} <= steps
        assert all(30 <= (after - before) * taken < 61 for before, after in itertools.pairwise(last))
        chosen.append(steps)
    common = sorted(chosen[0] & chosen[1])
    assert max((after - before) * 0.11 for before, after in itertools.pairwise(common)) < 121


def test_a_sketch_is_as_different_as_tensors_are() -> None:
    """Of all dtypes and sizes; of more tensors than are compared, neighbours count as one."""
    torch.manual_seed(2)
    for size in (1, 3, 1000, 100_003):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensor = torch.randn(size, dtype=dtype)
            other = tensor + 0.1 * torch.randn(size, dtype=dtype)
            one, two = sketch([tensor, other])
            assert np.isclose(one[SUMS], float(tensor.double().norm()), rtol=1e-2)
            apart = np.linalg.norm((one - two)[:SUMS]) / float((other - tensor).double().norm())
            assert 0.2 < apart < 3
    many = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(MAX_COMPARED + 1)])
    rows: list[Any] = []
    member = Member(ModelComparison(print, lambda: 1), 0, 2, lambda rank: (many, torch.optim.SGD(many, lr=1)))
    member.compare = rows.append  # type: ignore[method-assign]
    member.passes = 1
    member.watch.before_step(member, member.optimizer)
    checked_request("compare", {**rows[0], "by": "w"})
    assert len(rows[0]["names"]) == 1025 and rows[0]["names"][1] == "2"


@pytest.mark.parametrize("strict", [False, True], ids=["marked", "strict"])
def test_a_job_whose_workers_train_different_models(workers: Workers, strict: bool) -> None:
    """DistributedDataParallel, one of whose layers was unfrozen late: the result is marked, or the job ends."""
    workers.start_planned("unfrozen.py", strict=strict)
    said = "workers train different models: after 11 steps 0.weight and 0.bias differ between workers"
    if strict:
        assert set(workers.cluster.wait().values()) != {0}
        assert said in workers.cluster.output("central-global_server-0")
        assert "RESULT" not in workers.cluster.outputs()
    else:
        workers.finish()
        log = (workers.cluster.directory / "events" / "central-global_server-0.jsonl").read_text()
        events = [json.loads(line) for line in log.splitlines()]
        (marked,) = [event["message"] for event in events if event.get("affects_result")]
        assert said in marked and "A/worker:0 and B/worker:0" in marked


def warned(job: Rehearsal) -> list[str]:
    """What a job's events say that affects its result, by process."""
    job.finish()
    found = []
    for path in sorted((job.directory / "events").glob("*.jsonl")):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        found += [f"{path.stem}: {event['message']}" for event in events if event.get("affects_result")]
    return found


def test_workers_that_are_no_members_are_compared(desk: Desk) -> None:
    """`--reduce torch`: the first worker of a party sends what the others have posted."""
    found = warned(rehearsed(desk, "different.py", "weights", options=("--parties", "1", "--workers", "3")))
    said = "after 2 steps weight of A/worker:1 is not that of the other workers"
    assert any(line.startswith("central-global_server-0: workers train ") and said in line for line in found), found


def test_a_learning_rate_that_differs_between_local_steps(workers: Workers) -> None:
    workers.start_planned("different.py", "rate", algo="diloco", inner_steps=3)
    workers.finish()
    log = (workers.cluster.directory / "events" / "central-global_server-0.jsonl").read_text()
    assert "in step 1 lr is 0.1 in A/worker:0 and 0.05 in B/worker:0" in log


def test_weights_that_are_not_finite_are_named_with_distributed_data_parallel(workers: Workers) -> None:
    """By their worker, in a step in which models are not compared: after it all have them."""
    workers.start_planned("different.py", "nan")
    workers.finish()
    said = "parameter bias has elements that are not finite here in step 32"
    assert [workers.cluster.output(name).count(said) for name in ("A-worker-0", "B-worker-0")] == [0, 1]
