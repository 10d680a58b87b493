"""The values that workers leave for each other at the first root: what requests do, waits, and bounds by member."""

from typing import Any
from unittest.mock import Mock

import pytest

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.cluster import key_values as module
from geomx_cli.ps.cluster.bodies import checked_request
from geomx_cli.ps.cluster.key_values import KeyValues, KeyValueService
from geomx_cli.ps.cluster.members import Member
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.net.wire import BadMessage


class _Member:
    """A member that asks, by its name."""

    def __init__(self, values: KeyValueService, name: str) -> None:
        self._values = values
        self.link = Mock()
        self._member = Member(name, workers=1 + (name == "B"))
        self.answers: list[dict[str, Any]] = []

    def ask(self, op: str, *keys: str, **fields: Any) -> dict[str, Any] | None:
        """The answer, or None if it comes later, to `answers`."""
        body = checked_request("store", {"op": op, "keys": list(keys), **fields})
        before = len(self.answers)
        request = Request(self.link, "store", body, lambda answer, _: self.answers.append(answer))
        self._values.serve(request, self._member)
        return self.answers[before] if len(self.answers) > before else None


@pytest.fixture
def loop() -> Any:
    return Mock()


@pytest.fixture
def members(loop: Any) -> tuple[_Member, _Member]:
    values = KeyValues()
    service = KeyValueService(loop, values, values.apply)
    return _Member(service, "worker:0"), _Member(service, "B")


def test_values(members: tuple[_Member, _Member]) -> None:
    one, other = members
    one.ask("set", "a", "b", values=[b"1", b"2"])
    assert other.ask("get", "b", "a") == {"found": True, "values": [b"2", b"1"]}
    assert other.ask("get", "a", "c") == {"found": False, "values": []}
    assert other.ask("add", "a", number=-4) == {"number": -3}
    assert one.ask("append", "a", values=[b"0"]) == {} and one.ask("add", "a", number=0) == {"number": -30}
    assert one.ask("compare", "c", values=[b"", b"x"]) == {"values": [b"x"]}
    assert one.ask("compare", "c", values=[b"y", b"z"]) == {"values": [b"x"]}
    assert one.ask("compare", "none", values=[b"y", b"z"]) == {"values": [b"y"]}
    assert one.ask("check", "a", "c") == {"found": True} and one.ask("check", "a", "none") == {"found": False}
    assert one.ask("count", "") == {"number": 3}
    assert other.ask("delete", "a", "none") == {"number": 1} and one.ask("count", "") == {"number": 2}


def test_a_key_that_is_listed_twice_is_refused(members: tuple[_Member, _Member]) -> None:
    """Its value would be copied as often."""
    for op in ("append", "set", "get"):
        with pytest.raises(InvalidSettings, match="twice"):
            members[0].ask(op, *["k"] * 256, values=[b"x"] * 256)


def test_waits(members: tuple[_Member, _Member], loop: Any) -> None:
    """For all keys, and no longer than the request says."""
    one, other = members
    assert one.ask("get", "a", "b", seconds=5.0) is None and one.ask("wait", "c", seconds=7.0) is None
    other.ask("set", "a", values=[b"1"])
    assert not one.answers
    other.ask("set", "b", values=[b"2"])
    assert one.answers == [{"found": True, "values": [b"1", b"2"]}]
    (_, expire) = loop.call_later.call_args.args
    expire()
    assert one.answers[1:] == [{"found": False, "values": []}]
    other.ask("set", "c", values=[b""])
    assert len(one.answers) == 2


def test_what_a_dead_life_waited_for_is_forgotten(members: tuple[_Member, _Member], loop: Any) -> None:
    """So it takes no room from its next life, which asks for it again."""
    one, other = members
    for member in members:
        assert member.ask("wait", "a", seconds=1e8) is None
    one._values.forget_requests(one.link)
    assert loop.call_later.return_value.cancel.call_count == 1
    other.ask("set", "a", values=[b""])
    assert not one.answers and other.answers == [{}, {"found": True, "values": []}]


def test_bounds(members: tuple[_Member, _Member], monkeypatch: pytest.MonkeyPatch) -> None:
    """What one member stores and asks leaves the others theirs."""
    one, other = members
    with pytest.raises(InvalidSettings, match=r"at most 4194304"):
        for part in (b"x", bytes(4 * 2**20)):
            one.ask("append", "a", values=[part])
    with pytest.raises(BadMessage):
        one.ask("set", "a", values=[bytes(4 * 2**20 + 1)])
    with pytest.raises(BadMessage):
        one.ask("get", *map(str, range(257)))
    one.ask("set", "number", values=[b"9" * 19])
    with pytest.raises(InvalidSettings, match="no integer of 64 bits"):
        one.ask("add", "number", number=1)
    monkeypatch.setattr(module, "MAX_HELD", 4 * module.OVERHEAD)
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(module, "MAX_ANSWER", 10)
    with pytest.raises(InvalidSettings, match="worker:0 stores more than"):
        for each in range(10):
            one.ask("set", f"k{each}", values=[b"x"])
    other.ask("set", "k0", values=[b"x" * 20])  # which is the other's now
    one.ask("set", "k9", values=[b"x"])
    with pytest.raises(InvalidSettings, match="more than 10 bytes"):
        other.ask("get", "k0", seconds=0.0)
    one.ask("wait", "none", seconds=1.0)
    one.ask("wait", "none", seconds=1.0)
    with pytest.raises(InvalidSettings, match="worker:0 wait"):
        one.ask("wait", "none", seconds=1.0)
    for _ in range(4):  # a party of two workers
        assert other.ask("wait", "none", seconds=1.0) is None
    with pytest.raises(InvalidSettings, match="more than 4 requests of B wait"):
        other.ask("wait", "none", seconds=1.0)
