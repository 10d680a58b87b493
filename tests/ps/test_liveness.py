"""Which silent peers are given up, and what is dialled again."""

import time
from types import SimpleNamespace

import pytest
from bench import RecordingTransport

from geomx_cli.core.errors import PeerLost
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.cluster import liveness
from geomx_cli.ps.cluster.liveness import Liveness
from geomx_cli.ps.net import lanes
from geomx_cli.ps.net.lanes import LinkHealth
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import encode_body


class Clock:
    """The time that the modules under test see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        fields = {name: getattr(time, name) for name in ("time", "strftime", "localtime")}
        for module in (liveness, lanes):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now, **fields))


class Wire:
    """A connection whose counts the test sets."""

    counts = True

    def __init__(self) -> None:
        self.got = self.acked = 1000
        self.ended = False

    def received(self) -> int:
        return self.got

    def acknowledged(self) -> int:
        return self.acked

    def shut_down(self) -> None:
        self.ended = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


class Watched:
    """A peer that falls silent, of a process that gives up after 60 s."""

    def __init__(self, clock: Clock, *, supervised: bool) -> None:
        self.clock, self.lost = clock, list[PeerLost]()
        self.link = Link(RecordingTransport(1, 1), "A/worker:0", wide_area=False, greeting={})  # type: ignore[arg-type]
        self.link.control = lambda *_: None  # type: ignore[assignment, method-assign]
        self.liveness = Liveness(
            None, "A/server:0", EventLog(None), silence=60.0, interval=1.0,  # type: ignore[arg-type]
            on_lost=lambda _, error: self.lost.append(error), active=lambda: 0.0, supervised=supervised,
        )  # fmt: skip
        self.liveness.watch(self.link)
        self.wire = Wire()
        self.link.lanes.connections["control"] = self.wire  # type: ignore[assignment]
        self.link.health.hear(moved=False)

    def given_up_after(self, seconds: int, *, probes: bool) -> float | None:
        """When the peer is given up, in seconds; None: not within `seconds`. probes: its libzmq sends something."""
        began = self.clock.now
        while self.clock.now < began + seconds and not self.lost:
            self.clock.now += 1.0
            self.wire.got += 10 * (probes and self.clock.now % 2 == 0)
            self.liveness._tick()
        return self.clock.now - began if self.lost else None


@pytest.mark.parametrize(("supervised", "limit"), [(True, 60), (False, 10)])
def test_a_closed_connection_is_a_death_only_where_no_agent_tells_deaths(
    clock: Clock, supervised: bool, limit: int
) -> None:
    """It may have been reset on the way to a process that is stopped."""
    peer = Watched(clock, supervised=supervised)
    peer.link.health.echoed, peer.link.health.unsteady = clock.now, clock.now - 100
    peer.liveness.closed(peer.link)
    del peer.link.lanes.connections["control"]
    after = peer.given_up_after(100, probes=False)
    assert after is not None and limit < after <= limit + 2


@pytest.mark.parametrize("supervised", [True, False])
def test_a_process_that_runs_and_says_nothing_is_waited_for_under_an_agent(clock: Clock, supervised: bool) -> None:
    peer = Watched(clock, supervised=supervised)
    assert (peer.given_up_after(500, probes=True) is None) == supervised
    if supervised:  # until it is stopped
        after = peer.given_up_after(100, probes=False)
        assert after is not None and after <= lanes.UNPROBED + 2


def test_a_link_between_parties_may_be_silent_for_longer(clock: Clock) -> None:
    peer = Watched(clock, supervised=True)
    peer.liveness.watch(peer.link, 200.0)
    after = peer.given_up_after(300, probes=False)
    assert after is not None and 200 < after <= 202
    assert peer.lost[0].hint.endswith("needs a longer --absence")


def heartbeat(health: LinkHealth, acknowledged: int, taken: int) -> None:
    body = {"clock": 1.0, "echo": 0.0, "delay": 0.0, "acknowledged": acknowledged, "taken": taken}
    health.receive_heartbeat(memoryview(encode_body(body)))


@pytest.mark.parametrize(
    ("sent", "got", "peer_sent", "peer_got", "lost"),
    [(5000, 300, 300, 2000, True), (300, 2000, 5000, 300, True), (5000, 300, 300, 5000, False)],
    ids=["what is sent", "what the peer sends", "nothing"],
)
def test_bytes_that_are_acknowledged_and_do_not_arrive_are_lost(
    clock: Clock, sent: int, got: int, peer_sent: int, peer_got: int, lost: bool
) -> None:
    """A slow proxy, from which more arrives from time to time, has lost nothing."""
    health, wire = LinkHealth(), Wire()
    wire.acked, wire.got = sent, got

    def ages(slow: int) -> float:
        for second in range(30):
            heartbeat(health, peer_sent, peer_got + slow * second)
            age = health.lost_bytes(wire)  # type: ignore[arg-type]
            clock.now += 1.0
        return age

    assert (ages(0) > liveness.STALLED) == lost
    assert ages(1) < 2.0
