"""A worker that holds a valid key and turns against the job changes nothing that its own contributions would not."""

import sys
from pathlib import Path

import pytest
from cluster import ROOT, Cluster
from rounds import PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in, launch_planned

TAKEN_OVER = [sys.executable, str(ROOT / "tests/scripts/taken_over.py")]
FLAT = {"topology": "flat"}


def attacked(cluster: Cluster, attack: str, options: dict[str, str], other: str = "") -> str:
    """Run a job of two parties of two workers, with keys, in which A/worker:1 attacks; check what all others save.

    Returns the output of the attacker.
    """
    planned = cluster.planned(SCRIPT[1:], {"parties": 2, "workers": 2, **options}, one_host=False)
    attacker = planned.process("A/worker:1").file_name
    cluster.each[attacker] = {"ATTACK": attack, "OTHER": other}
    launch_planned(cluster, planned, {attacker: TAKEN_OVER})
    cluster.finish()
    found = found_in(cluster.directory)
    parties = [[0, 1, 2, 3]] if options == FLAT else [[0, 1], [2, 3]]
    assert sorted(found) == [0, 1, 2, 3]
    assert_equal(found, expected(parties, dict.fromkeys(range(4), PLANNED_ROUNDS), optimizer=True))
    return cluster.output(attacker)


@pytest.mark.parametrize("attack", ["replace_optimizer", "read_optimizer_state"])
@pytest.mark.parametrize(
    ("options", "other"), [(FLAT, "A/worker:0"), ({}, "central/worker:0")], ids=["flat", "central"]
)
def test_requests_in_the_name_of_another_are_refused(
    cluster: Cluster, tmp_path: Path, attack: str, options: dict[str, str], other: str
) -> None:
    said = attacked(cluster, attack, options, other)
    assert f"in the name of {other} (each process makes requests in its own name)" in said
    events = "".join(path.read_text() for path in tmp_path.glob("events/*server-0.jsonl"))
    assert "refused a message from A/worker:1: A/worker:1 makes the request" in events
