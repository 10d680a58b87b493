"""What a worker that holds a valid key and turns against the job cannot do, and what is reported of the rest."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench import KeptLink
from cluster import ROOT, Cluster
from rounds import PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in, launch_planned

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.ps import placement_service
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.cluster.config import NodeSettings, PlaneSettings
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.cluster.server_members import CENTRAL, ServerMembers
from geomx_cli.ps.net.wire import BadMessage
from geomx_cli.ps.placement_service import PlacementService

TAKEN_OVER = [sys.executable, str(ROOT / "tests/scripts/taken_over.py")]
FLAT = {"topology": "flat"}
NOT_MASTER = "A/worker:1 asks for asynchronous training, and is not the master worker"


def attacked(
    cluster: Cluster, attacks: str, options: dict[str, str], other: str = "", *, in_vain: bool = True
) -> str:
    """Run a job of two parties of two workers, with keys, in which A/worker:1 attacks; check what all save if that is
    `in_vain`. Returns the output of the attacker.
    """
    planned = cluster.planned(SCRIPT[1:], {"parties": 2, "workers": 2, **options}, one_host=False)
    attacker = planned.process("A/worker:1").file_name
    cluster.each[attacker] = {"ATTACKS": attacks, "OTHER": other}
    launch_planned(cluster, planned, {attacker: TAKEN_OVER})
    cluster.finish()
    found = found_in(cluster.directory)
    parties = [[0, 1, 2, 3]] if options == FLAT else [[0, 1], [2, 3]]
    assert sorted(found) == [0, 1, 2, 3]
    if in_vain:
        assert_equal(found, expected(parties, dict.fromkeys(range(4), PLANNED_ROUNDS), optimizer=True))
    return cluster.output(attacker)


@pytest.mark.parametrize(
    ("options", "other"), [(FLAT, "A/worker:0"), ({}, "central/worker:0")], ids=["flat", "central"]
)
def test_requests_in_the_name_of_another_are_refused(
    cluster: Cluster, tmp_path: Path, options: dict[str, str], other: str
) -> None:
    said = attacked(cluster, "replace_optimizer read_optimizer_state", options, other)
    assert said.count(f"in the name of {other} (each process makes requests in its own name)") == 2
    events = "".join(path.read_text() for path in tmp_path.glob("events/*server-0.jsonl"))
    assert "refused a message from A/worker:1: A/worker:1 makes the request" in events


@pytest.mark.parametrize("options", [FLAT, {}], ids=["flat", "central"])
def test_what_a_worker_attempts_counts_for_nothing(cluster: Cluster, options: dict[str, str]) -> None:
    """To do what only the master may, to list a key twice in a declaration, to claim to be a thousand workers, and to
    ask for a codec once training has begun.
    """
    said = attacked(cluster, "switch_to_async declare_twice claim_workers compress", options)
    assert NOT_MASTER in said and "key 'large' is listed twice in one declaration" in said
    assert "gradient compression 1bit" in said and "is asked for, and training has begun" in said
    workers = [name for name in cluster.processes if name[0] in "AB" and "worker" in name]
    assert [cluster.output(name).split()[3] for name in workers] == ["4"] * 4


def test_only_the_master_switches_to_asynchronous_training(cluster: Cluster) -> None:
    assert NOT_MASTER in attacked(cluster, "switch_to_async", {"rank_scope": "global"})


@pytest.mark.parametrize(
    "options",
    [
        FLAT, {}, {"rank_scope": "global", "global_servers": 2, "central_workers": 1}, {"central_workers": 2},
        {"topology": "spread"}, {"topology": "spread", "central_workers": 1},
        {"topology": "spread", "rank_scope": "global"},
    ],
    ids=str,
)  # fmt: skip
def test_the_master_of_each_topology_switches_to_asynchronous_training(
    cluster: Cluster, options: dict[str, Value]
) -> None:
    planned = cluster.planned(SCRIPT[1:], {"parties": 2, "workers": 1, **options})
    masters = [process for process in planned.processes if process.env.get("DMLC_ROLE_MASTER_WORKER")]
    master = masters[0] if masters else planned.process("A/worker:0")
    cluster.each[master.file_name] = {"ATTACKS": "switch_to_async"}
    launch_planned(cluster, planned, {master.file_name: TAKEN_OVER})
    cluster.finish()
    assert "\ndone\n" in cluster.output(master.file_name)


def test_who_may_be_the_master_of_a_job_that_was_started_by_hand() -> None:
    """Ranks are assigned by schedulers, and only the first root of several is sure to know the rank scope."""
    plane = PlaneSettings("localhost", 1, servers=1, workers=2)
    root = NodeSettings(role="global_server", local=plane, upper=plane)
    parties, central = [("global", 0), ("global", 1)], [("local", 0), ("local", 1)]
    for scope, present, masters in (
        ("party", parties + central, [CENTRAL, CENTRAL + 1]), ("global", parties + central, [0]),
        ("", parties + central, [0, 1, CENTRAL, CENTRAL + 1]), ("party", parties, [0, 1]), ("global", parties, [0]),
    ):  # fmt: skip
        members = ServerMembers(root, is_root=True)
        for name, rank in present:
            link: Any = KeptLink()
            link.hello = {"plane": name, "rank": rank}
            members.arrive(link)
        ranks = [members.rank_of(link) for link in members.arrived()]
        assert sorted(rank for rank in ranks if members.may_be_master(rank, scope)) == masters


@pytest.mark.parametrize(
    ("options", "server", "pair"),
    [
        (FLAT, "central-server-0", ("A/worker:0", "A/worker:1")),
        ({}, "central-global_server-0", ("central/worker:0", "A/server:0")),
        ({"rank_scope": "global"}, "A-server-0", ("A/worker:0", "A/worker:1")),
    ],
    ids=["flat", "central", "rank scope global"],
)
def test_a_second_initial_value_is_warned_of(
    cluster: Cluster, tmp_path: Path, options: dict[str, str], server: str, pair: tuple[str, str]
) -> None:
    """Whichever comes first counts."""
    assert "\ndone\n" in attacked(cluster, "push_initial", options, in_vain=False)
    events = (tmp_path / "events" / f"{server}.jsonl").read_text()
    assert any(f"an initial value by {first} and by {then}" in events for first, then in (pair, pair[::-1]))


def test_local_servers_claim_the_workers_that_the_plan_has() -> None:
    plane = PlaneSettings("localhost", 1, servers=2, workers=4)
    settings = NodeSettings(role="global_server", upper=plane, rank=0, num_all_workers=5)
    members = ServerMembers(settings, True)

    def arrive(name: str, party: int, workers: int, plane: str = "global") -> None:
        link: Any = KeptLink()
        link.name, link.hello = name, {"rank": party, "plane": plane, "workers": workers}
        members.arrive(link)

    arrive("A/server:0", 0, 2)
    with pytest.raises(BadMessage, match="A/server:1 claims 3 workers, and A/server:0 of its party 2"):
        arrive("A/server:1", 0, 3)
    with pytest.raises(BadMessage, match="B/server:0 claims 4 workers, more than the plan of 5 has"):
        arrive("B/server:0", 1, 4)
    with pytest.raises(BadMessage, match="an arrival without rank and plane"):
        arrive("C/worker:0", 0, 1, "local")
    arrive("A/server:1", 0, 2)
    arrive("B/server:0", 1, 3)
    assert members.workers_by_party() == [2, 3]


def test_a_declaration_has_as_many_slices_as_one_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_service, "MAX_ANSWERED", 10)
    plane = PlaneSettings("localhost", 1, servers=1, workers=1)
    settings = NodeSettings(local=plane, options={"slice_elements": 100, "p3": False})
    node: Any = SimpleNamespace(settings=settings)
    service = PlacementService(node, ServerMembers(settings, True), None, Compression())
    answers: list[dict[str, Any]] = []
    link: Any = KeptLink()

    def declare(*sizes: int) -> None:
        tensors = [[f"of {size}", size, "float32", 1, -1] for size in sizes]
        service.declare(Request(link, "declare", {"tensors": tensors}, lambda body, _: answers.append(body)))

    declare(600, 400)
    with pytest.raises(InvalidSettings, match=r"more than 10 slices \(initialise fewer keys at once"):
        declare(600, 400, 100)
    declare(100)
    assert [[len(slices) for _, slices in answer["placements"]] for answer in answers] == [[6, 4], [1]]
