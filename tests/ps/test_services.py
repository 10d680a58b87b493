"""Control requests as commands, which give the same state again; barriers of two levels; the table of members."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench, KeptLink

from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core.errors import InvalidSettings, PeerLost
from geomx_cli.core.options import Value
from geomx_cli.ps import server_state
from geomx_cli.ps.aggregation.compression import Compression
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.cluster.key_values import MAX_VALUE
from geomx_cli.ps.cluster.members import CENTRAL, Member, ServerMembers
from geomx_cli.ps.cluster.partition import Placements
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.local_services import LocalServices
from geomx_cli.ps.server_state import ServerState
from geomx_cli.ps.services import RootServices, Services
from geomx_cli.runtime.algorithms.fsa import FsaServer

PLANE = PlaneSettings("localhost", 1, servers=1, workers=2)
OPTIONS: dict[str, Value] = {
    "slice_elements": 100, "p3": False, "timeout": 10.0, "strict": False, "reduce": "", "rank_scope": "party"
}  # fmt: skip
TENSORS = [["a", 250, "float32", 1, -1], ["b", 30, "float32", 1, -1]]
COMMANDS: list[tuple[int, str, Body]] = [
    (0, "cluster", {"rank_scope": "party"}),
    (0, "declare", {"tensors": TENSORS, "by": "0"}),
    (1, "declare", {"tensors": TENSORS[:1], "by": "1"}),
    (0, "optimizer", {"name": "sgd", "params": {"learning_rate": 0.5}, "by": "0"}),
    (1, "compression", {"spec": "fp16"}),
    (1, "patience", {"seconds": 77.0}),
    (0, "barrier", {"scope": "all", "number": 1}),
    (1, "barrier", {"scope": "all", "number": 1}),
    (0, "barrier", {"scope": "party", "number": 1}),
    (0, "store", {"op": "set", "keys": ["k"], "values": [b"1"]}),
    (1, "leave", {}),
    (1, "bye", {}),
]


def arrived(members: ServerMembers, count: int, plane: str = "local") -> list[Member]:
    """The records of new members, of ranks from 0."""
    for rank in range(count):
        link: Any = KeptLink()
        link.name, link.hello = f"{rank}", {"rank": rank, "plane": plane}
        members.arrive(link)
    return list(members)


def node_of(settings: NodeSettings) -> Any:
    loop = SimpleNamespace(call_later=lambda *_: None, submit=lambda do: do())
    asked: list[tuple[str, Body, Any, Any]] = []
    rpc = SimpleNamespace(
        ask=lambda link, topic, body, answer, refuse, *_: asked.append((topic, body, answer, refuse)), asked=asked
    )
    return SimpleNamespace(settings=settings, loop=loop, rpc=rpc, patience=60.0, memberships=[SimpleNamespace(rank=0)])


class Polled(FsaServer):
    """Workers ask it for something again and again."""

    def on_request(self, topic: str, body: dict[str, Any], is_root: bool) -> dict[str, Any] | None:
        return {}

    def keeps(self, topic: str, body: dict[str, Any]) -> bool:
        return True


class Root:
    """A flat root with two members, which arrive unless an earlier life of it has left its state in `folder`."""

    def __init__(self, folder: Path | None = None, algorithm: FsaServer | None = None) -> None:
        settings = NodeSettings(role="server", local=PLANE, options=OPTIONS)
        self.members = ServerMembers(settings, True)
        self.bench, self.node, self.wan = Bench(algorithm=algorithm), node_of(settings), Compression()
        self.placements = Placements(settings, self.members, is_root=True, ratio=lambda: 1.0, rank=lambda: 0)
        state = ServerState(folder, lambda _: None)
        self.services = RootServices(
            self.node, self.members, self.bench.rounds, self.wan, state, self.placements
        )
        if not state.restore(self.members, self.bench.rounds, self.services):
            arrived(self.members, 2)
        self.senders = list(self.members)

    def apply(self, commands: list[tuple[int, str, Body]]) -> list[Body]:
        return [self.services.apply(topic, body, self.senders[rank]) for rank, topic, body in commands]

    def state(self) -> Any:
        barriers = {scope: (each.reached, each.met) for scope, each in self.services._barriers.items()}
        optimizer = self.bench.rounds.optimizer
        placed = {name: placement.slices for name, placement in self.placements._placed.items()}
        return (
            self.members.save(), barriers, self.node.patience, self.wan.spec, self.services._rank_scope, placed,
            self.services._values._values, optimizer and (optimizer.name, optimizer.params),
        )  # fmt: skip


def test_the_same_commands_give_the_same_state_again() -> None:
    one, other = Root(), Root()
    answers = one.apply(COMMANDS)
    assert other.apply(COMMANDS) == answers and other.state() == one.state()
    assert one.members.required_contributors() == [0] and one.services._barriers["all"].met == 1


def test_a_command_that_is_applied_twice_changes_nothing() -> None:
    root = Root()
    answers = root.apply(COMMANDS)
    before = root.state()
    assert root.apply(COMMANDS) == answers and root.state() == before


def test_the_next_life_of_a_server_has_the_state_of_all_commands(tmp_path: Path) -> None:
    """Wherever the first one is killed, and even if the last command is then asked for again."""
    for count in range(len(COMMANDS) + 1):
        folder = tmp_path / str(count)
        folder.mkdir()
        one = Root(folder)
        one.apply(COMMANDS[:count])
        if count:
            other = Root(folder)
            assert other.state() == one.state()
            other.apply(COMMANDS[max(0, count - 1) :])
            calm = Root()
            calm.apply(COMMANDS)
            assert other.state() == calm.state()


def test_a_summary_replaces_any_number_of_barriers_and_stored_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the file stays short, and the next life has the same state."""
    monkeypatch.setattr(server_state, "SHORTEST", 2000)
    one = Root(tmp_path)
    one.apply(COMMANDS[:-2])
    for number in range(2, 200):
        barriers = [(rank, "barrier", {"scope": "all", "number": number}) for rank in (0, 1)]
        one.apply([*barriers, (1, "store", {"op": "add", "keys": ["n"], "number": 1, "by": "1", "call": number})])
    assert (tmp_path / "commands").stat().st_size < 3 * 2000 and not (tmp_path / "commands.part").exists()
    other = Root(tmp_path)
    assert other.state() == one.state() and other.services._barriers["all"].met == 199
    assert other.services._values._held == one.services._values._held
    again = (1, "store", {"op": "add", "keys": ["n"], "number": 1, "by": "1", "call": 199})
    assert other.apply([again]) == [{"number": 198}], "its answer was lost"


def test_the_next_life_saves_no_request_of_the_algorithm_once_more(tmp_path: Path) -> None:
    sizes = []
    for _ in range(3):
        Root(tmp_path, Polled()).apply([(0, "poll", {"party": 1})])
        sizes.append((tmp_path / "commands").stat().st_size)
    assert sizes[0] and len(set(sizes)) == 1


def test_a_refused_command_changes_nothing() -> None:
    root = Root()
    root.apply(COMMANDS)
    before = root.state()
    for rank, topic, body in (
        (0, "declare", {"tensors": [["new", 40, "float32", 1, -1], ["a", 300, "float32", 1, -1]], "by": "0"}),
        (0, "compression", {"spec": "int8"}), (1, "optimizer", {"name": "adam", "params": {}, "by": "1"}),
        (0, "store", {"op": "set", "keys": ["k", "l", "m"], "values": [b"2", b"3", bytes(MAX_VALUE + 1)]}),
        (0, "store", {"op": "append", "keys": ["k", "l"], "values": [b"2"]}),
    ):  # fmt: skip
        with pytest.raises((InvalidSettings, ValueError)):
            root.apply([(rank, topic, body)])
    assert root.state() == before
    later = (0, "declare", {"tensors": [["c", 50, "float32", 1, -1]], "by": "0"})
    assert root.apply([later]) == Root().apply([*COMMANDS, later])[-1:], "also the numbers of later keys"


def test_what_was_decided_by_rounds_is_decided_alike_in_the_next_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker asks for the optimizer of a master that does not train: before the first round it would replace it."""
    monkeypatch.setattr(ServerMembers, "trains", lambda _, rank: rank > 0)
    root = Root(tmp_path)
    body = {"name": "sgd", "params": {"learning_rate": 0.5}}
    root.apply([(0, "optimizer", {**body, "by": "0"})])
    root.bench.init(np.zeros(SIZE, np.float32))
    for rank in range(2):
        root.bench.push(rank, 1, np.ones(SIZE, np.float32))
    assert root.bench.rounds.table.last_round == 1
    root.apply([(1, "optimizer", {**body, "by": "1"})])
    assert root.bench.rounds.history.uses == Root(tmp_path).bench.rounds.history.uses == 1


# Barriers.


def ask(services: Services, sender: Member, scope: str, number: int, answers: list[Any], name: str) -> None:
    def answered(body: Body, _: bool) -> None:
        answers.append((name, body.get("error", "")))

    body = {"scope": scope, "number": number}
    services._on_barrier(Request(sender.link, "barrier", body, answered), sender)  # type: ignore[arg-type]


def test_a_request_for_a_barrier_is_answered_once_all_are_there_and_at_once_later() -> None:
    root, answers = Root(), list[Any]()
    first, second = root.senders
    ask(root.services, first, "all", 1, answers, "a")
    ask(root.services, first, "all", 1, answers, "a again")
    ask(root.services, first, "all", 2, answers, "early")
    assert answers == [] and [missing for _, missing in root.services.at_barriers()] == [{1}]
    ask(root.services, second, "all", 1, answers, "b")
    assert [name for name, _ in answers] == ["a", "a again", "b"]
    ask(root.services, second, "all", 1, answers, "b again")
    assert answers[-1] == ("b again", "")
    root.services.apply("leave", {}, second)
    root.services.release_barriers()
    assert answers[-1] == ("early", "") and list(root.services.at_barriers()) == []


def test_requests_of_a_dead_life_are_forgotten() -> None:
    """So it does not seem to wait at a barrier, which it has reached all the same."""
    root = Root()
    first, second = root.senders
    answers = list[Any]()
    ask(root.services, first, "all", 1, answers, "dead")
    assert first.link is not None
    root.services.forget_requests(first.link)
    assert list(root.services.at_barriers()) == []
    ask(root.services, second, "all", 1, answers, "b")
    ask(root.services, first, "all", 1, answers, "again")
    assert [name for name, _ in answers] == ["b", "again"]


def local() -> tuple[LocalServices, list[Member], Any]:
    settings = NodeSettings(role="server", local=PLANE, upper=PLANE, options=OPTIONS)
    members, node = ServerMembers(settings, False), node_of(settings)
    placements = Placements(settings, members, is_root=False, ratio=lambda: 1.0, rank=lambda: 0)
    upstream: Any = SimpleNamespace(links=["root"])
    state = ServerState(None, lambda _: None)
    services = LocalServices(node, members, upstream, Bench().rounds, Compression(), state, placements, lambda: 0)
    return services, arrived(members, 2), node.rpc.asked


def test_a_local_server_reaches_the_barrier_of_the_parties_with_the_same_number() -> None:
    services, (first, second), asked = local()
    answers = list[Any]()
    for number in (1, 2):
        ask(services, first, "all", number, answers, f"a{number}")
        ask(services, second, "all", number, answers, f"b{number}")
    assert [(topic, body) for topic, body, _, _ in asked] == [
        ("barrier", {"scope": "all", "number": 1}), ("barrier", {"scope": "all", "number": 2})
    ]  # fmt: skip
    ask(services, first, "all", 1, answers, "a1 again")
    assert answers == [] and len(asked) == 2, "the other parties are not there"
    asked[0][2]({})
    assert sorted(name for name, _ in answers) == ["a1", "a1 again", "b1"]
    ask(services, second, "all", 1, answers, "b1 again")
    assert answers[-1] == ("b1 again", "") and len(asked) == 2
    asked[1][2]({})
    assert sorted(name for name, _ in answers[-2:]) == ["a2", "b2"]


def test_a_barrier_that_failed_above_may_be_asked_for_again() -> None:
    services, members, asked = local()
    answers = list[Any]()
    for member in members:
        ask(services, member, "all", 1, answers, member.process)
    asked[0][3](PeerLost("the root is gone"))
    assert answers == [("0", "the root is gone"), ("1", "the root is gone")]
    ask(services, members[0], "all", 1, answers, "again")
    assert len(asked) == 2
    asked[1][2]({})
    assert answers[-1] == ("again", "")


# Members.


def test_the_table_of_members_is_carried_over_a_restart() -> None:
    """Who has left or set up the job is still known, and members that come again are no second ones."""
    settings = NodeSettings(role="global_server", local=PLANE, upper=PLANE)
    members = ServerMembers(settings, True)
    for plane, rank in (("global", 0), ("global", 1), ("local", 0), ("local", 1)):
        link: Any = KeptLink()
        link.name, link.hello = f"{plane} {rank}", {"rank": rank, "plane": plane, "workers": 2, "party": f"P{rank}"}
        members.arrive(link)
    assert members.complete and members.required_contributors() is None
    assert members.initializing() == [CENTRAL, CENTRAL + 1]
    for rank in (CENTRAL, CENTRAL + 1):
        assert members.set_up(rank)
    members.leave(next(iter(members)))
    assert members.required_contributors() == [1]

    again = ServerMembers(settings, True)
    again.load(members.save())
    assert again.complete and again.required_contributors() == [1], "though no link stands yet"
    assert again.workers_by_party() == [2, 2] and again.training() == [1]
    for member in members:
        link = KeptLink()
        link.name, link.hello = member.process, dict(member.link.hello)  # type: ignore[union-attr]
        again.arrive(link)
    assert again.save() == members.save() and again.required_contributors() == [1]


def members_of(*workers: int) -> ServerMembers:
    """The members of a root: parties with so many workers each."""
    upper = replace(PLANE, workers=len(workers))
    members = ServerMembers(NodeSettings(role="global_server", upper=upper), True)
    for rank, count in enumerate(workers):
        link: Any = KeptLink()
        link.name, link.hello = f"{rank}", {"rank": rank, "plane": "global", "workers": count, "party": f"P{rank}"}
        members.arrive(link)
    return members


def test_a_party_that_is_left_out_counts_as_the_mean_of_the_others() -> None:
    members = members_of(1, 2, 4)
    assert members.required_contributors() == [0, 1, 2] and members.share_factor([0, 1, 2]) == 1
    members.leave_out(1, 1000.0, 7)
    assert members.required_contributors() == [0, 2] and members.training() == [0, 2]
    assert members.share_factor([0, 2]) == 7 / 5
    assert members.share_factor([0, 1, 2]) == 1, "it had contributed before"
    again = ServerMembers(NodeSettings(role="global_server", upper=replace(PLANE, workers=3)), True)
    again.load(members.save())
    assert again.required_contributors() == [0, 2] and [each.out_round for each in again.out] == [7]
    again.take_in(1)
    assert again.required_contributors() == [0, 1, 2] and not again.out and again.party(1).out_since == 1000.0


def test_at_least_half_of_the_parties_remain_and_the_first_always() -> None:
    members = members_of(1, 1, 1, 1)
    assert members.may_leave_out([1]) and members.may_leave_out([2, 3]) and not members.may_leave_out([1, 2, 3])
    assert not members.may_leave_out([0]), "its first worker evaluates and saves"
    members.leave_out(3, 1000.0, 7)
    assert members.may_leave_out([1]) and not members.may_leave_out([1, 2])
