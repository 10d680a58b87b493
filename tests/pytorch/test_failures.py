"""Failures: what scripts see, and that no worker is left waiting."""

import signal
from typing import Any

import numpy as np
import pytest
from cluster import until
from reference import Dense
from workers import Workers

pytestmark = pytest.mark.processes


def statuses(workers: Workers, kind: str = "w") -> dict[str, int]:
    """Exit statuses of all workers; kind: what their names have."""
    return {name: status for name, status in workers.cluster.wait().items() if kind in name}


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("shape", "InvalidSettings: tensor weight is trained, float32 of shape (6, 12) here and trained, float32 of"
         " shape (5, 12) in the worker that sets the weights | build the same model"),
        ("state", "InvalidSettings: the optimizer is Adam with groups of [2] here, and SGD with [2] in the worker"),
    ],
)  # fmt: skip
def test_models_that_differ_are_refused(workers: Workers, how: str, said: str) -> None:
    workers.start("breaks.py", how)
    assert all(statuses(workers).values()), workers.cluster.outputs()
    assert said in workers.cluster.output("w1"), workers.cluster.outputs()
    assert said.partition(" | ")[0].partition(": ")[2] in workers.cluster.output("w0"), workers.cluster.outputs()


@pytest.mark.parametrize("algorithm", ["fsa", "mixed"])
def test_sparse_gradients_are_not_exchanged(workers: Workers, algorithm: str) -> None:
    workers.start("embedding.py", parties=(1, 1), env={"GEOMX_ALGO": algorithm})
    assert all(statuses(workers).values()), workers.cluster.outputs()
    assert "InvalidSettings: the gradient of weight is sparse" in workers.cluster.outputs()


SHARDS = {"reduce": "torch", "shards": 2, "parties": 1}
CHANGED = " was changed while it was exchanged"
DIFFERS = "was not the same here as in the worker whose model all have now"
WITHIN = "a step of the optimizer within the backward pass"


@pytest.mark.parametrize(
    ("how", "algorithm", "said"),
    [
        ("step", "fsa", WITHIN), ("step", "reduce", WITHIN), ("clip", "fsa", CHANGED), ("clip", "reduce", CHANGED),
        ("clip", "p3", CHANGED), ("clip", "shards", CHANGED),
        ("wide", "fsa", " is of float64, and contributions to it are of float32"),
        ("weights", "mixed", "the script has changed weight other than by steps, and the global servers hold"),
        ("data", "mixed", "the script has changed weight other than by steps, and the global servers hold"),
        ("state", "mixed", "this SGD has state, and the global servers, which hold its state, have none"),
    ],
)  # fmt: skip
def test_what_would_train_something_else_is_refused(workers: Workers, how: str, algorithm: str, said: str) -> None:
    shards = {**SHARDS, "workers": 2}
    options: dict[str, Any] = {"reduce": {"reduce": "torch"}, "p3": {"p3": True}, "shards": shards}.get(
        algorithm, {"algo": algorithm}
    )
    workers.start_planned("misuse.py", how, *(["divided"] if algorithm == "shards" else []), **options)
    assert all(statuses(workers, "-worker-").values()), workers.cluster.outputs()
    assert said in workers.cluster.outputs()


@pytest.mark.parametrize(
    ("how", "algorithm"),
    [("swap", "mixed"), ("rate", "fsa"), ("none", "fsa"), ("failed", "fsa"), ("cleared", "fsa")],
)
def test_what_is_no_misuse_or_is_warned_of(workers: Workers, how: str, algorithm: str) -> None:
    """Weights that are the same again, nan too, may have been changed; models that differ at the end are named."""
    workers.start("misuse.py", how, parties=(1, 1), env={"GEOMX_ALGO": algorithm})
    workers.finish()
    assert workers.cluster.outputs().count(DIFFERS) == (how == "rate"), workers.cluster.outputs()
    assert np.array_equal(workers.saved(0)["weight"], workers.saved(1)["weight"])


@pytest.mark.parametrize(
    ("words", "options"),
    [((), {"reduce": "torch", "parties": 1, "workers": 2}), ((), {"reduce": "torch", "workers": 2}),
     (("divided",), {**SHARDS, "workers": 4})],
    ids=["party", "parties", "replicas"],
)  # fmt: skip
def test_another_model_within_a_party_is_named(
    workers: Workers, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    """In one worker: the other has the model that all get."""
    workers.start_planned("misuse.py", "rate", *words, **options)
    workers.finish()
    assert workers.cluster.outputs().count(DIFFERS) == 1, workers.cluster.outputs()


def test_a_script_that_raises_ends_the_others(workers: Workers) -> None:
    workers.start("breaks.py", "raises")
    assert statuses(workers) == {"w0": 1, "w1": 1}, workers.cluster.outputs()
    assert "ValueError: no such sample" in workers.cluster.output("w1")
    assert "PeerLost: the script raised ValueError: no such sample | " in workers.cluster.output("w0")


def test_a_worker_killed_within_a_round_ends_the_others(workers: Workers) -> None:
    workers.start("breaks.py", "killed")
    until((workers.cluster.directory / "ready").exists, state=workers.cluster.outputs)
    workers.cluster.processes["w1"].kill()
    assert statuses(workers)["w0"] == 1, workers.cluster.outputs()
    said = next(line for line in workers.cluster.output("w0").splitlines() if line.startswith("PeerLost: "))
    assert said.partition(" | ")[2], said


def test_workers_may_take_different_numbers_of_steps(workers: Workers) -> None:
    """The mean is that of the workers that still train; all end with the model of those that trained longest."""
    workers.start("steps.py", "3", "7", "5", parties=(1, 2))
    workers.finish()
    found = [workers.saved(rank) for rank in range(3)]
    assert [len(one["gradients"]) for one in found] == [3, 7, 5]
    alone = Dense()
    for step in range(7):
        alone.step([rank for rank, steps in enumerate((3, 7, 5)) if step < steps], step)
    for one in found:
        assert np.array_equal(one["weight"], found[0]["weight"])
    np.testing.assert_allclose(found[0]["weight"], alone.weight, rtol=1e-4, atol=1e-6)


def test_ctrl_c_ends_a_job_started_by_hand(workers: Workers) -> None:
    workers.start("breaks.py", "killed")
    until((workers.cluster.directory / "ready").exists, state=workers.cluster.outputs)
    workers.cluster.processes["w0"].send_signal(signal.SIGINT)  # it waits in backward for the other
    assert workers.cluster.processes["w0"].wait(240) != 0, workers.cluster.outputs()
    assert "KeyboardInterrupt" in workers.cluster.output("w0"), workers.cluster.outputs()
