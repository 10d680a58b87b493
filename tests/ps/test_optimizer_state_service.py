"""Reading and writing a root's optimizer state, and refusals."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import checked_request
from geomx_cli.ps.cluster.members import Member
from geomx_cli.ps.net.wire import BadMessage
from geomx_cli.ps.optim import optimizers
from geomx_cli.ps.optim.optimizer import PIECE, SerializedArrays, deserialize
from geomx_cli.ps.optimizer_service import OptimizerStateService

MEMBER = Member("a")
MOMENTUM = {"0/0/step": np.array([5]), "0/0/momentum": np.arange(SIZE, dtype=np.float32)}


class Root(Bench):
    """A root with momentum, which drops a silent writer after `silence` seconds."""

    def __init__(self, silence: float = 60.0) -> None:
        super().__init__()
        self.rounds.use(optimizers.create("sgd", {"learning_rate": 0.1, "momentum": 0.5}))
        self.init(np.zeros(SIZE, np.float32))
        self.desk = OptimizerStateService(self.rounds, silence, lambda: 2)
        self.number = 0

    def round(self) -> None:
        self.number += 1
        for rank in (0, 1):
            self.push(rank, self.number, np.ones(SIZE, np.float32))

    def ask(self, topic: str, by: str = "a", **body: Any) -> dict[str, Any]:
        return self.desk.serve(topic, {"by": by, **body}, MEMBER)

    def read(self, by: str = "a") -> dict[str, Array]:
        run, size = bytearray(), self.ask("state_open", by)["size"]
        while len(run) < size:
            run += self.ask("state_read", by, at=len(run))["piece"]
        self.ask("state_close", by)
        return deserialize(run)

    def begin(self, packed: SerializedArrays, by: str = "a", **changes: Any) -> str:
        body = {"optimizer": "sgd", "whole": packed.digest(), "digest": packed.digest(), "size": packed.size, **changes}
        return str(self.ask("state_begin", by, **body)["go"])

    def write(self, named: Mapping[str, Array], by: str = "a", **changes: Any) -> None:
        packed = SerializedArrays(named)
        assert self.begin(packed, by, **changes) == "on"
        for at, piece in packed.pieces():
            self.ask("state_write", by, at=at, piece=piece)


def test_what_was_read_can_be_written_back() -> None:
    root = Root()
    root.round()
    saved = root.read()
    assert saved["0/0/step"] == 1 and np.allclose(saved["0/0/momentum"], -0.2)
    root.round()
    root.write(saved)
    assert root.read()["0/0/step"] == 1
    root.write({})
    assert root.read() == {}


def test_who_reads_sees_one_moment() -> None:
    root = Root()
    root.round()
    assert [root.ask("state_open", by)["optimizer"] for by in "ab"] == ["sgd"] * 2
    root.round()
    root.ask("state_open", "c")
    steps = [deserialize(root.ask("state_read", by, at=0)["piece"])["0/0/step"][0] for by in "abc"]
    assert steps == [1, 1, 2]
    root.ask("state_close", "a")
    assert root.ask("state_read", "b", at=0)["piece"]
    with pytest.raises(InvalidSettings, match="a has not opened"):
        root.ask("state_read", "a", at=0)


def test_what_is_loaded_meanwhile_changes_nothing_of_what_is_read() -> None:
    root = Root()
    root.round()
    before = root.read()
    assert root.ask("state_open", "a")["loaded"] == ""
    root.write({}, "b", whole="X")
    assert deserialize(root.ask("state_read", "a", at=0)["piece"]).keys() == before.keys()
    assert root.ask("state_open", "a")["loaded"] == "X"
    assert root.read() == {}, "as many updates as before, and another state"
    assert root.begin(SerializedArrays({}), "c", whole="Y") == "known"
    assert root.ask("state_open", "a")["loaded"] == "Y"


def test_a_member_that_opens_again_and_again_rests_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy takes the root's loop for as long as the state is large; other members need not rest."""
    root = Root()
    root.round()
    clock = iter([100.0, 100.5])
    with monkeypatch.context() as patch:
        patch.setattr("geomx_cli.ps.optimizer_service.time.monotonic", lambda: next(clock))
        root.ask("state_open")
    with monkeypatch.context() as patch:
        patch.setattr("geomx_cli.ps.optimizer_service.time.monotonic", lambda: 101.0)
        assert root.desk.rest(MEMBER) == 4.5 and root.desk.rest(Member("b")) < 0


def test_an_index_longer_than_any_state_needs_is_refused_before_it_is_read() -> None:
    root = Root()
    root.round()
    with pytest.raises(InvalidSettings, match="there are at most 68 arrays"):
        root.write({f"0/0/{number}": np.zeros(0, np.float32) for number in range(1000)})


def test_one_writes_and_the_others_bring_the_same() -> None:
    root = Root()
    packed = SerializedArrays(MOMENTUM)
    assert [root.begin(packed, by) for by in "abab"] == ["on", "wait", "on", "wait"]
    root.ask("state_write", at=0, piece=packed.piece(0))
    assert [root.begin(packed, by) for by in "ab"] == ["known", "known"]
    root.round()
    assert root.begin(packed, "b") == "on", "it is not what the servers have any more"


def test_a_silent_writer_makes_room() -> None:
    root = Root(silence=0.0)
    packed = SerializedArrays(MOMENTUM)
    assert [root.begin(packed, by) for by in "ab"] == ["on", "on"]
    with pytest.raises(InvalidSettings, match="unexpected piece"):
        root.ask("state_write", "a", at=0, piece=packed.piece(0))


@pytest.mark.parametrize(
    ("named", "changes", "words"),
    [
        (MOMENTUM, {"optimizer": "adam"}, "that of adam, and the servers run sgd"),
        (MOMENTUM, {"size": 2**40}, "too much"),
        (MOMENTUM, {"digest": "0"}, "changed in transit"),
        ({**MOMENTUM, "0/0/momentum": np.zeros(3, np.float32)}, {}, "3 elements"),
        ({"7/0/step": np.array([1])}, {}, "does not have"),
        ({"x": np.array([1])}, {}, "does not have"),
        ({"0/0/momentum": np.zeros(SIZE, np.float32)}, {}, "no state of sgd"),
    ],
)
def test_what_does_not_fit_changes_nothing(named: Mapping[str, Array], changes: dict[str, Any], words: str) -> None:
    root = Root()
    root.round()
    with pytest.raises(InvalidSettings, match=words):
        root.write(named, **changes)
    assert root.read()["0/0/step"] == 1
    root.write(MOMENTUM)
    assert root.read()["0/0/step"] == 5


@pytest.mark.parametrize("piece", [b"", bytes(PIECE + 1)])
def test_pieces_have_bounds(piece: bytes) -> None:
    root = Root()
    assert root.begin(SerializedArrays(MOMENTUM)) == "on"
    with pytest.raises(InvalidSettings, match="unexpected piece"):
        root.ask("state_write", at=0, piece=piece)
    with pytest.raises(InvalidSettings, match="unexpected piece"):
        root.ask("state_write", at=-1, piece=b"x")
    with pytest.raises(BadMessage, match=">= 0"):
        checked_request("state_read", {"by": "a", "at": -1})
    with pytest.raises(TypeError):
        root.ask("state_write", at=0, piece=2**50)


def test_without_an_optimizer_there_is_no_state() -> None:
    root = Root()
    root.rounds.history.use(None, {})
    for topic in ("state_open", "state_begin"):
        with pytest.raises(InvalidSettings, match="no optimizer on the servers"):
            root.ask(topic, optimizer="sgd", whole="", digest="", size=1)
