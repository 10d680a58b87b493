"""What a TSEngine relay keeps for its peers, with an upstream client and transports that record."""

import pytest
from bench import RecordingTransport

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.delivery._tsengine_relay import FORGOTTEN, LONGEST, MAX_PASSING, MAX_VAIN, Relay
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import BadMessage, Form, Header, Kind

LENGTH = 256
PAYLOAD = memoryview(bytes(4 * LENGTH))


class Fixture:
    """The relay of rank 0, whose peer of rank 1 sends through it. Its server answers nothing by itself."""

    def __init__(self, window: int = 1 << 40) -> None:
        self.above, self.beside = RecordingTransport(1 << 16, window), RecordingTransport(1 << 16, 1 << 40)
        self.server = Link(self.above, "root 0", wide_area=True, greeting={})  # type: ignore[arg-type]
        self.peer = Link(self.beside, "peer 1", wide_area=True, greeting={})  # type: ignore[arg-type]
        self.upstream = UpstreamClient()
        self.upstream.links, self.upstream.peers = [self.server], {1: self.peer}
        self.warnings: list[str] = []
        self.relay = Relay(self.upstream, self.up, lambda header: header.root, lambda _: True, self.warnings.append)

    def up(self, server: int, header: Header, payload: memoryview | None, on_result: object) -> None:
        self.upstream.send(self.upstream.links[server], header, payload, on_result)  # type: ignore[arg-type]

    def take(self, key: int, round_: int, *, alone: bool) -> None:
        """The peer sends a contribution, to be passed on alone or added."""
        header = _contribution(1, key, round_)
        header.request, header.asynchronous = 7, alone
        header.form = Form.ENCODED if alone else Form.FULL
        self.relay.take(self.peer, 1, header, PAYLOAD)

    def contribute(self, key: int, round_: int) -> None:
        """The relay contributes alone."""
        self.own = _contribution(0, key, round_)
        self.relay.send_apart(self.own)
        self.up(0, self.own, PAYLOAD, lambda _, __: None)

    @property
    def refused(self) -> int:
        """Contributions that the peer has to send another way."""
        return sum(header.topic == "overlay" for header in self.beside.control)


def _contribution(rank: int, key: int, round_: int) -> Header:
    about = {"length": LENGTH, "size": LENGTH, "weight": 1.0, "contributors": (rank,)}
    return Header(kind=Kind.EXCHANGE, key=key, round=round_, **about)  # type: ignore[arg-type]


@pytest.mark.parametrize("alone", [True, False])
def test_what_a_relay_keeps_is_bounded_by_its_own_slices_and_rounds(alone: bool) -> None:
    """Whatever a peer sends: other slices, more rounds, one many times. The rest is refused, and goes to the server."""
    fixture = Fixture()
    for key in range(500):
        fixture.take(key, 1, alone=alone)
    assert fixture.refused == 500 and not fixture.upstream.waiting and not fixture.relay._groups
    fixture.contribute(3, 1)
    own = fixture.upstream.waiting
    for _ in range(3):
        for round_ in range(2, 200):
            fixture.take(3, round_, alone=alone)
    if alone:
        assert fixture.upstream.waiting - own == MAX_PASSING
    else:
        assert len(fixture.relay._groups) == 1 and fixture.upstream.waiting == own
    assert fixture.refused - 500 >= 3 * (198 - MAX_PASSING)


@pytest.mark.parametrize("alone", [True, False])
def test_contributions_that_are_longer_than_the_own_one_are_refused(alone: bool) -> None:
    fixture = Fixture()
    fixture.contribute(3, 1)
    for length, size in ((16 * LENGTH, 16 * LENGTH), (LENGTH, 2 * LENGTH)):
        header = _contribution(1, 3, 2)
        header.length, header.size, header.asynchronous = length, size, alone
        with pytest.raises(BadMessage, match="unlike this process's own"):
            fixture.relay.take(fixture.peer, 1, header, memoryview(bytes(4 * length)))
    header = _contribution(1, 3, 2)
    header.asynchronous, header.form = alone, Form.ENCODED if alone else Form.FULL
    with pytest.raises(BadMessage, match="unlike this process's own"):
        fixture.relay.take(fixture.peer, 1, header, memoryview(bytes(64 * LENGTH)))
    assert fixture.refused == 3, "the peer sends them another way"
    assert not fixture.relay._groups and fixture.upstream.waiting == 1


def test_after_some_announcements_that_are_not_kept_nothing_waits_for_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture, now = Fixture(), 1000.0
    monkeypatch.setattr("geomx_cli.ps.delivery._tsengine_relay.time.monotonic", lambda: now)
    waited = []
    for round_ in range(1, 9):
        fixture.relay.expect(1, [(3, 0)])
        own = _contribution(0, 3, round_)
        fixture.relay.take_own(own, PAYLOAD, lambda _, __: None)
        waited.append(not own.request)
        now += LONGEST + 1
        fixture.relay.check()
        assert own.request, "it was sent"
    assert waited == [True] * MAX_VAIN + [False] * (8 - MAX_VAIN)
    (warning,) = fixture.warnings
    assert warning.startswith("in 4 rounds contributions that peer 1 had announced did not come within 5 s")


def test_a_peer_that_is_late_now_and_then_or_with_many_slices_at_once_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fixture, now = Fixture(), 1000.0
    monkeypatch.setattr("geomx_cli.ps.delivery._tsengine_relay.time.monotonic", lambda: now)
    for round_ in range(1, 200, FORGOTTEN + 1):
        for key in range(8):
            fixture.relay.expect(1, [(key, 0)])
            own = _contribution(0, key, round_)
            fixture.relay.take_own(own, PAYLOAD, lambda _, __: None)
            assert not own.request, "it waits"
        now += LONGEST + 1
        fixture.relay.check()
    assert not fixture.warnings


def test_a_place_is_free_again_when_the_result_has_come() -> None:
    fixture = Fixture()
    fixture.contribute(3, 1)
    for round_ in range(2, 300):
        fixture.take(3, round_, alone=True)
        about = {"key": 3, "round": round_, "length": LENGTH, "size": LENGTH}
        result = Header(kind=Kind.RESULT, request=fixture.above.sent[-1], **about)  # type: ignore[arg-type]
        fixture.upstream.on_result(fixture.server, result, PAYLOAD)
    assert not fixture.refused and fixture.beside.sent == [7] * 298 and fixture.upstream.waiting == 1


def test_what_waits_for_the_own_contribution_has_returned_its_credit() -> None:
    """Otherwise it would hold up other slices of its sender."""
    fixture = Fixture()
    fixture.contribute(3, 1)
    fixture.take(3, 2, alone=False)
    assert fixture.relay._groups and not fixture.refused
    fixture.peer.flush_credit()
    assert [header.topic for header in fixture.beside.control] == ["credit"]


def test_what_is_passed_on_does_not_wait_for_the_window() -> None:
    """It is full of the relay's own contributions, which the server keeps until those of the peer have come."""
    fixture = Fixture(1 << 17)
    for key in range(500):
        fixture.contribute(key, 1)
    sent = len(fixture.above.sent)
    fixture.server.credit(0, sent * len(PAYLOAD))  # all has arrived, and is kept there
    assert 20 < sent < 480 and len(fixture.above.sent) == sent
    for key in range(20):
        fixture.take(key, 1, alone=True)
        assert len(fixture.above.sent) == sent + key + 1
