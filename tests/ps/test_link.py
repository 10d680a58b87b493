"""What a link sends on a new connection, with an upstream client and a transport that records."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from bench import RecordingTransport

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.net import lanes
from geomx_cli.ps.net import transport as transports
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import Header, Kind, encode_body
from geomx_cli.ps.worker import Worker

SLICE, WINDOW, COUNT = 1 << 16, 1 << 18, 25


@pytest.mark.parametrize("lane", ["tensors", "control"])
def test_a_new_connection_gets_each_message_once_in_order(lane: Lane) -> None:
    """First those that were in flight on the old one, then those in the queue. Tensors in flight count in the window
    until they are lost.
    """
    transport, upstream = RecordingTransport(SLICE, WINDOW), UpstreamClient()
    link = Link(transport, "root 0", wide_area=True, greeting={})  # type: ignore[arg-type]
    for index in range(COUNT):
        header = Header(kind=Kind.PUSH, slice=index, length=SLICE // 4, size=COUNT * SLICE // 4)
        upstream.send(link, header, memoryview(bytes(SLICE)), lambda _, __: None)
    in_flight = WINDOW // SLICE
    assert transport.sent == list(range(1, in_flight + 1))
    transport.sent.clear()
    transport.on_reconnect = upstream.repeat  # type: ignore[method-assign]
    link.reset(lane)
    link.resume(lane)
    assert transport.sent == (list(range(1, in_flight + 1)) if lane == "tensors" else [])
    for received in range(1, in_flight + COUNT + 1):
        link.credit(received * SLICE, received * SLICE)
    assert transport.sent == list(range(1, COUNT + 1))


def test_fused_tensors_do_not_wait_for_a_long_turn_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are one message, sent when another message is handled after the first has waited long enough."""
    now = [100.0]
    monkeypatch.setattr(transports, "time", SimpleNamespace(monotonic=lambda: now[0]))
    links, transport, upstream = transports.FusingLinks(), RecordingTransport(SLICE, WINDOW), UpstreamClient()
    monkeypatch.setattr(transport, "fuses", links.add)
    link = Link(transport, "root 0", wide_area=False, greeting={})  # type: ignore[arg-type]

    def send(index: int) -> None:
        header = Header(kind=Kind.PUSH, slice=index, length=8, size=32)
        upstream.send(link, header, memoryview(bytes(32)), lambda _, __: None)

    for index in range(3):
        send(index)
        links.flush_due()
    assert transport.sent == []
    now[0] += 2 * transports.LONGEST
    links.flush_due()
    assert transport.sent == [1], "the request of the first of three in one message"
    send(3)
    assert transport.sent == [1]
    links.flush()
    assert transport.sent == [1, 4]


def _contribution(key: int, contributors: tuple[int, ...] = (0,)) -> Header:
    about = {"length": SLICE // 4, "size": SLICE // 4, "weight": 1.0, "contributors": contributors}
    return Header(kind=Kind.EXCHANGE, key=key, round=1, **about)  # type: ignore[arg-type]


@pytest.mark.parametrize("send", [UpstreamClient.send, UpstreamClient.pass_on], ids=["own", "passed on"])
def test_what_another_process_has_brought_is_not_sent(send: Callable[..., None]) -> None:
    """The result comes while the contribution waits for the window."""
    transport, upstream, ended = RecordingTransport(SLICE, SLICE), UpstreamClient(), []
    link = Link(transport, "root 0", wide_area=False, greeting={})  # type: ignore[arg-type]
    headers = [_contribution(key) for key in range(3)]
    for header in headers:
        send(upstream, link, header, memoryview(bytes(SLICE)), lambda header, _: ended.append(header.key))
    result = Header(kind=Kind.RESULT, request=headers[1].request, key=1, round=1, length=SLICE // 4, size=SLICE // 4)
    upstream.on_result(link, result, memoryview(bytes(SLICE)))
    assert ended == [1] and transport.sent == [1]
    link.credit(SLICE)
    assert transport.sent == [1, 3]


def test_the_own_contribution_replaces_a_refused_one_without_credit() -> None:
    """Also one that was about to be sent again."""
    transport, upstream = RecordingTransport(SLICE, SLICE), UpstreamClient()
    link = Link(transport, "root 0", wide_area=False, greeting={})  # type: ignore[arg-type]
    for key in range(3):
        upstream.send(link, _contribution(key, (0, 1)), memoryview(bytes(SLICE)), lambda _, __: None)
    before = transport.sent[:]
    upstream.replace(3, _contribution(2), memoryview(bytes(SLICE)))
    assert before == [1] and transport.sent == [1, 3]
    link.credit(2 * SLICE)
    assert transport.sent == [1, 3, 2]


def test_on_a_slow_link_the_first_layers_slices_overtake_all_that_are_not_under_way() -> None:
    """Slices that the receiver asks for go before them, without credit, but not while the path is full."""
    transport = RecordingTransport(SLICE, WINDOW)
    link = Link(transport, "root 0", wide_area=True, greeting={})  # type: ignore[arg-type]

    def send(request: int, priority: int) -> None:
        header = Header(kind=Kind.EXCHANGE, request=request, key=request, round=1, priority=priority)
        link.send(header, memoryview(bytes(SLICE)))

    for request in range(1, 11):
        send(request, -request)  # the last layers' are ready first
    send(20, 0)
    path = WINDOW // SLICE
    assert transport.sent == list(range(1, path + 1))
    link.credit(SLICE, SLICE)
    assert transport.sent[path:] == [20]
    assert link.want(10, 0, 1) and not link.want(30, 0, 1)
    assert transport.sent[path:] == [20], "the path is full"
    link.credit(SLICE, 3 * SLICE)
    send(30, 0)
    assert transport.sent[path:] == [20, 10, 30], "though the receiver has returned credit for one slice only"
    link.credit((path + 3) * SLICE, (path + 3) * SLICE)
    assert transport.sent[path + 3 :] == [5, 6, 7, 8]


def test_what_has_arrived_is_reported_on_a_wide_area_link_only() -> None:
    for wide_area in (True, False):
        transport = RecordingTransport(SLICE, WINDOW)
        link = Link(transport, "root 0", wide_area=wide_area, greeting={})  # type: ignore[arg-type]
        link.arrived(SLICE)
        link.flush_credit()
        assert [header.arrived for header in transport.control] == ([SLICE] if wide_area else [])


def test_who_waits_in_vain_says_why_its_messages_were_refused() -> None:
    transport = RecordingTransport(SLICE, WINDOW)
    transport.warn = lambda _: None  # type: ignore[attr-defined]
    links = [Link(transport, f"root {number}", wide_area=False, greeting={}) for number in (0, 1)]  # type: ignore[arg-type]
    worker = SimpleNamespace(upstream=SimpleNamespace(links=links))
    assert Worker._hint(worker, "is it stuck?") == "is it stuck?"  # type: ignore[arg-type]
    for why in ("the slice was not declared", "too many pulls", "the slice was not declared"):
        links[1].on_control(Header(topic="refused"), memoryview(encode_body({"why": why})))
    assert links[1].refusals == ["the slice was not declared", "too many pulls"]
    said = "root 1 refused a message of this process: the slice was not declared"
    assert Worker._hint(worker, "is it stuck?") == said  # type: ignore[arg-type]


def test_heartbeats_tell_the_round_trip_without_the_time_at_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is under way is limited by the path, not by what else was sent when slices were."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(lanes.time, "monotonic", lambda: clock.now)
    ends = lanes.LinkHealth(), lanes.LinkHealth()
    receiver = 0
    for held, trip, beats in ((0.7, 0.05, 3), (0.2, 0.03, 3), (0.9, 0.2, 3), (0.5, 0.2, 500)):  # between two; both ways
        for _ in range(beats):
            clock.now += held
            body = {"clock": clock.now, "echo": ends[1 - receiver].clock, "delay": ends[1 - receiver].echo_delay()}
            clock.now += trip / 2
            ends[receiver].receive_heartbeat(memoryview(encode_body(body)))
            receiver = 1 - receiver
        if held == 0.9:
            assert [end.round_trip for end in ends] == pytest.approx([0.03, 0.03], rel=0.05)
    assert [end.round_trip for end in ends] == pytest.approx([0.2, 0.2]), "the route has become longer"
