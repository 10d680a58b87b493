"""What a worker that holds a valid key and turns against the job cannot do, and what is reported of the rest."""

import contextlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from bench import KeptLink
from cluster import ROOT, Cluster
from rounds import PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in, launch_planned

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.ps.cluster import partition
from geomx_cli.ps.cluster.members import CENTRAL, Member, ServerMembers
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.cluster.scheduler import Scheduler
from geomx_cli.ps.local_services import LocalServices
from geomx_cli.ps.net.wire import BadMessage, encode_body
from geomx_cli.ps.server_state import ServerState

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
    said = attacked(cluster, "replace_optimizer read_optimizer_state compare_as", options, other)
    assert said.count(f"in the name of {other} (each process makes requests in its own name)") == 3
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


def test_who_asks_without_end_hinders_nobody(cluster: Cluster, tmp_path: Path) -> None:
    said = attacked(cluster, "waste toil stand_for_others", {})
    assert "refused: key 'last' has 26000000000 elements" in said
    assert "a key is listed twice in one request" in said
    for path in tmp_path.glob("events/*.jsonl"):
        assert not re.search(r"refused a message from (?!A/worker:1)", path.read_text())


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
        ranks = [member.rank for member in members]
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


def test_who_reports_a_failure_that_it_cannot_know_of_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """A worker that reports a process of another party, and who reports one of its own party."""
    scheduler = SimpleNamespace(
        _joined=lambda: {"A/server:0", "A/worker:0"},
        node=SimpleNamespace(process="A/scheduler:0"), _global=False,
    )

    def reported(by: str, role: str, process: str) -> tuple[str, str]:
        member: Any = SimpleNamespace(process=by, role=role)
        body = {"process": process, "message": "out of memory", "hint": "buy more"}
        error = Scheduler._reported(scheduler, member, body)  # type: ignore[arg-type]
        return error.peer, error.message

    assert reported("A/worker:1", "worker", "A/worker:1") == ("A/worker:1", "out of memory")
    for known in ("A/worker:0", "A/server:0", "A/scheduler:0", "A/worker:7"):
        assert reported("A/worker:1", "worker", known) == (known, "out of memory (reported by A/worker:1)")
    assert reported("A/server:0", "server", "B/worker:0") == ("B/worker:0", "out of memory")
    what = "A/worker:1 reported that B/worker:0 failed, of which it cannot know: out of memory"
    assert reported("A/worker:1", "worker", "B/worker:0") == ("A/worker:1", what)
    planned = cluster.planned(SCRIPT[1:], {"parties": 2, "workers": 2}, one_host=False)
    attacker = planned.process("A/worker:1").file_name
    cluster.each[attacker] = {"ATTACKS": "report_another", "OTHER": "B/worker:0"}
    launch_planned(cluster, planned, {attacker: TAKEN_OVER})
    assert set(cluster.wait().values()) != {0}
    logs = [path for path in tmp_path.glob("events/*.jsonl") if path.stem != attacker]
    events = [json.loads(line) for path in logs for line in path.read_text().splitlines()]
    failed = [(event.get("peer"), event["message"]) for event in events if event["event"] == "failed"]
    what = "A/worker:1 reported that B/worker:0 failed, of which it cannot know: its GPU burns"
    failed = [(peer, said) for peer, said in failed if not said.startswith("waited")]  # never joined
    assert len(failed) >= 7 and set(failed) <= {("A/worker:1", what), (None, what)}, failed


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


class Placements:
    """The declarations at a first root, or at a local server, with slices of 100 elements; `answers`: to them."""

    def __init__(self, upstream: Any = None) -> None:
        plane = PlaneSettings("localhost", 1, servers=1, workers=1)
        settings = NodeSettings(local=plane, options={"slice_elements": 100, "p3": False})
        self.asked: list[tuple[dict[str, Any], Any, Any]] = []
        rpc = SimpleNamespace(ask=lambda link, topic, body, answer, refuse: self.asked.append((body, answer, refuse)))
        node: Any = SimpleNamespace(settings=settings, rpc=rpc, loop=SimpleNamespace(submit=lambda do: do()))
        members = ServerMembers(settings, True)
        self.placements = partition.Placements(
            settings, members, is_root=upstream is None, ratio=lambda: 1.0, rank=lambda: 0
        )
        state = ServerState(None, lambda _: None)
        self.local = upstream and LocalServices(
            node, members, upstream, None, None, state, self.placements, lambda: 0  # type: ignore[arg-type]
        )
        self.answers: list[list[list[Any]]] = []
        self.senders: dict[str, Member] = {}

    def declare(self, *sizes: int, by: str = "A/worker:0", name: str = "", through: str = "") -> None:
        """Declare keys called "NAME of SIZE", as `by`, through a local server if that is not empty."""
        sender = self.senders.setdefault(through or by, Member(through or by))
        body = {"tensors": [[f"{name} of {size}", size, "float32", 1, -1] for size in sizes], "by": by}
        request: Any = Request(None, "declare", body, lambda answer, _: self._answered(answer))  # type: ignore[arg-type]
        if self.local is not None:
            self.local._on_declare(request, sender)
        else:
            request.answer(self.placements.place(body, sender))

    def _answered(self, answer: dict[str, Any]) -> None:
        self.answers.append(answer if "error" in answer else msgspec.msgpack.decode(encode_body(answer))["placements"])

    def counts(self) -> list[list[int]]:
        """The number of slices of each key, by answer."""
        return [[len(slices) for _, slices in answer] for answer in self.answers]


def test_a_declaration_has_as_many_slices_as_one_answer_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_ANSWERED", 10)
    root = Placements()
    root.declare(600, 400)
    with pytest.raises(InvalidSettings, match=r"more than 10 slices \(initialise fewer keys at once"):
        root.declare(600, 400, 100)
    root.declare(100)
    assert root.counts() == [[6, 4], [1]]


def test_who_declares_without_end_leaves_room_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused declaration counts for nothing, and nothing is cut for it. The one that declares is named."""
    monkeypatch.setattr(partition, "MAX_SLICES_OF_ALL", 100)
    monkeypatch.setattr(partition, "OF_PARTY", 50)
    monkeypatch.setattr(partition, "OF_ONE", 25)
    cut, cuts = partition._cut, list[int]()
    monkeypatch.setattr(partition, "_cut", lambda units, most: cuts.append(units) or cut(units, most))
    root, taken_over = Placements(), {"by": "A/worker:1", "through": "A/server:0"}
    for turn in range(400):
        try:
            root.declare(1000, name=str(turn), **taken_over)
        except InvalidSettings as error:
            assert "20 of them declared first by A/worker:1; 25 is the limit" in error.message
        with pytest.raises(InvalidSettings, match="at most"):
            root.declare(26_000_000_000, name=f"large {turn}", **taken_over)
    assert cuts == [1000, 1000]
    root.declare(10, name="honest", by="A/worker:0", through="A/server:0")
    root.declare(2500, name="honest", by="B/worker:0", through="B/server:0")
    root.declare(1000, name="0", **taken_over)  # what is known may be declared again
    assert root.counts() == [[10], [10], [1], [25], [10]]
    for worker in range(2, 9):
        with contextlib.suppress(InvalidSettings):
            root.declare(2000, name=f"by {worker}", by=f"A/worker:{worker}", through="A/server:0")
    with pytest.raises(InvalidSettings, match=r"declared first by A/server:0; 50 is the limit"):
        root.declare(1000, name="late", by="A/worker:0", through="A/server:0")
    root.declare(2400, name="late", by="C/worker:0", through="C/server:0")
    with pytest.raises(InvalidSettings, match=r"90 already, 41 of them declared first by A/server:0; 100 is the limit"):
        root.declare(1100, name="too late", by="D/worker:0", through="D/server:0")


def test_a_local_server_asks_once_for_what_a_member_declares_again_and_again() -> None:
    """The request is short and the root's answer long."""
    local = Placements(upstream=SimpleNamespace(links=["root"]))
    for _ in range(100):
        local.declare(300, by="A/worker:1")
    local.declare(500, by="A/worker:0")
    assert [body["by"] for body, _, _ in local.asked] == ["A/worker:1", "A/worker:0"]
    for number, (_, answer, _) in enumerate(list(local.asked)):
        answer({"placements": [(number, [(0, 300, 0, 0)])]})
    assert len(local.asked) == 2 and len(local.answers) == 101
