"""The bundled job with differential gradient transmission: nothing lost trains the same, some loss nearly so."""

import json
from typing import Any

import pytest
from cluster import ROOT
from desk import Desk
from rehearsal import Rehearsal

pytestmark = pytest.mark.processes


def trained(desk: Desk, algo: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """The digest of the final weights, the same on all workers, and the result."""
    name = f"job-{'-'.join((algo, *arguments)).replace(' ', '')}"
    words = ["--local", "--job-dir", name, "--network", "linear", "--data", "wide:data", "--algo", *algo.split()]
    words += ["--optimizer", "sgd", "--lr", "0.02", "--batch-size", "16", "--epochs", "2", "--eval-every", "0"]
    job = Rehearsal(desk, *words, *arguments, PYTHONPATH=f"{ROOT}:{ROOT / 'tests/scripts'}")
    job.finish()
    (digest,) = {event["parameters"] for event in job.finished().values()}
    return digest, json.loads(job.output)


@pytest.mark.parametrize("algo", ["hfa --k1 3 --k2 4", "diloco --inner-steps 4", "fsa --topology spread"])
def test_reordered_blocks_train_the_same_weights(desk: Desk, algo: str) -> None:
    without, _ = trained(desk, algo)
    reordered, _ = trained(desk, algo, "--dgt", "2", "--dgt-block", "256")
    assert without == reordered


def test_lost_blocks_cost_less_than_a_percent_of_accuracy(desk: Desk) -> None:
    _, direct = trained(desk, "fsa")
    assert 0.6 < direct["accuracy"] < 0.95
    for loss in ("0.01", "0.05", "0.2"):
        _, found = trained(desk, "fsa", "--dgt", "1", "--dgt-block", "256", "--dgt-k", "0.3", "--dgt-loss", loss)
        assert found["datagrams"]["received"] > 50 * 2 * 5 * 256
        assert found["datagrams"]["missing"] > 0
        assert abs(found["accuracy"] - direct["accuracy"]) < 0.01


def test_quantised_blocks_train_as_well(desk: Desk) -> None:
    _, direct = trained(desk, "fsa")
    _, found = trained(desk, "fsa", "--dgt", "3", "--dgt-block", "256", "--dgt-k", "0.2")
    assert abs(found["accuracy"] - direct["accuracy"]) < 0.01
    assert found["bytes"]["wan"][0] < direct["bytes"]["wan"][0]
