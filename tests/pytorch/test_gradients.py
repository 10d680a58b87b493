"""fsa and sync in scripts: after `backward` all workers have the mean gradient."""

from typing import Any

import numpy as np
import pytest
import torch
from reference import Dense
from torch.utils.data import DataLoader
from workers import Workers

from geomx_cli.runtime.frontends.torch.data import ShardSampler

STEPS = 20


@pytest.mark.processes
@pytest.mark.parametrize("parties", [(), (2, 2)], ids=["sync", "fsa"])
def test_four_workers_train_as_one_on_all_their_batches(workers: Workers, parties: tuple[int, ...]) -> None:
    workers.start("steps.py", str(STEPS), count=4, parties=parties)
    workers.finish()
    alone = Dense()
    for step in range(STEPS):
        alone.step(list(range(4)), step)
    found = [workers.saved(rank) for rank in range(4)]
    for one in found:
        assert np.array_equal(one["weight"], found[0]["weight"]) and np.array_equal(one["bias"], found[0]["bias"])
        assert np.array_equal(one["gradients"], found[0]["gradients"])
    np.testing.assert_allclose(found[0]["weight"], alone.weight, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found[0]["bias"], alone.bias, rtol=1e-4, atol=1e-6)


@pytest.mark.processes
def test_what_scripts_do_in_their_loops(workers: Workers) -> None:
    """See scripts/features.py, which compares with training in one process; here workers are compared."""
    workers.start("features.py")
    workers.finish()
    first, second = (workers.saved(rank) for rank in range(2))
    parts = [set(one.pop("part").tolist()) for one in (first, second)]
    assert not parts[0] & parts[1] and [len(part) for part in parts] == [10, 10]
    drawn = [one.pop("drawn").reshape(2, 10) for one in (first, second)]
    for epoch in range(2):
        assert len({*drawn[0][epoch].tolist(), *drawn[1][epoch].tolist()}) == 20
    assert not np.array_equal(*drawn[0])
    assert len(first) == 6 and all(np.array_equal(first[name], second[name]) for name in first), first.keys()


@pytest.mark.processes
@pytest.mark.parametrize("p3", ["0", "1"])
@pytest.mark.parametrize("parties", [(), (1, 1)], ids=["sync", "fsa"])
def test_gradients_that_share_memory(workers: Workers, parties: tuple[int, ...], p3: str) -> None:
    """See scripts/aliases.py, which compares with training in one process."""
    workers.start("aliases.py", parties=parties, env={"ENABLE_P3": p3})
    workers.finish()


@pytest.mark.processes
def test_unusual_parameters(workers: Workers) -> None:
    """See scripts/edges.py."""
    workers.start("edges.py")
    workers.finish()


@pytest.mark.processes
def test_several_models_in_one_pass(workers: Workers) -> None:
    """See scripts/several.py: adversaries, actor and critic, and gradients that arrive in another order."""
    workers.start("several.py")
    workers.finish()
    first, second = (workers.saved(rank) for rank in range(2))
    assert len(first) == 4 and all(np.array_equal(first[name], second[name]) for name in first), first.keys()


@pytest.mark.parametrize(
    ("how", "what"), [("samples", "the gradient of weight has"), ("skip", ""), ("weights", "parameter weight has")]
)
def test_who_spoils_the_weights_is_said(workers: Workers, how: str, what: str) -> None:
    """Once, in that worker; not where the step is skipped in all, as GradScaler does."""
    workers.start("damaged.py", how, parties=(1, 1))
    workers.finish()
    said = f"warning: {what} elements that are not finite here in step 5, so all workers' weights"
    outputs = [workers.cluster.output(name) for name in ("Aw0", "Bw0")]
    assert [text.count("not finite") for text in outputs] == [0, 1 if what else 0], outputs
    assert not what or said in outputs[1]
    assert np.isnan(workers.saved(0)["weight"]).any() == bool(what)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "shards", "where", "workers_warned"),
    [((), 1, "here", [1]), (("skip",), 1, "here", []), (("divided",), 2, "in this party", [0, 1])],
    ids=["reduce", "reduce-skip", "shards"],
)
def test_who_spoils_the_weights_is_said_where_parties_add_gradients(
    workers: Workers, words: tuple[str, ...], shards: int, where: str, workers_warned: list[int]
) -> None:
    """By the worker, also if it exchanges nothing itself; fully_shard has added the gradients before, of the party."""
    workers.start_planned("damaged.py", *words, workers=2, reduce="torch", shards=shards)
    workers.finish()
    said = f"the gradient of weight has elements that are not finite {where} in step 5, so all workers' weights"
    names = [f"{party}-worker-{rank}" for party in "AB" for rank in range(2)]
    counts = [workers.cluster.output(name).count(said) for name in names]
    assert counts == [int(rank in workers_warned) for rank in range(4)], workers.cluster.outputs()


@pytest.mark.processes
@pytest.mark.parametrize("ahead", [{}, {"num_workers": 1, "persistent_workers": True}], ids=["alone", "ahead"])
def test_epochs_of_a_sampler(ahead: dict[str, Any]) -> None:
    """Evaluation, or a look at a batch before or within an epoch, is none; nor is an epoch without a step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    data = range(100)
    seen = ShardSampler(data, 0, 2, shuffle=True, seed=1)
    expected = []
    for epoch in range(6):
        seen.set_epoch(epoch)
        expected.append([*seen])
    assert len(seen) == 50 and len({tuple(each) for each in expected}) == 6
    sampler = ShardSampler(data, 0, 2, shuffle=True, seed=1)
    loader, another = (DataLoader(data, 10, sampler=sampler, **ahead) for _ in range(2))
    next(iter(loader))
    drawn = []
    for epoch in (0, 1, 1, 2, 3):
        drawn.append([])
        for number, batch in enumerate(loader):
            drawn[-1] += batch.tolist()
            if number == 1:
                next(iter(another))
            if len(drawn) != 2:  # in which gradients are accumulated
                optimizer.step()
        assert drawn[-1] == expected[epoch]
        evaluated = [sample for batch in another for sample in batch.tolist()]
        assert evaluated == expected[epoch + (len(drawn) != 2)]
    next(iter(sampler))
    optimizer.step()  # so the fifth epoch is over
    assert [*sampler] == expected[5]
