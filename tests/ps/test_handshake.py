"""When a link's ends send again what may be lost with a connection."""

import time
from collections.abc import Callable
from functools import partial

import pytest

from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.net.lanes import LANES, Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.transport import Handler, Transport
from geomx_cli.ps.net.wire import Header, Kind

LATE = 0.2
"""Seconds by which the welcome of one lane crosses later than what is sent on the other one meanwhile."""


@pytest.mark.parametrize("lane", LANES)
def test_answers_to_what_the_listening_end_sends_again_arrive(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use the new connection, though the question has crossed on the other one."""
    loop, heard = Loop(), list[Kind]()

    def on_reconnect(link: Link, which: Lane) -> None:
        if which == lane:
            _say(link, LANES[1 - LANES.index(lane)])

    listener = _transport(loop, "listener", lambda _, header, __: heard.append(header.kind), on_reconnect)
    dialler = _transport(loop, "dialler", lambda link, _, __: _say(link, lane))
    welcomed = Link._on_welcome

    def welcomed_late(link: Link, number: int) -> None:
        late = LATE if link.lanes.lane_of(number) == lane else 0.0
        loop.call_later(late, partial(welcomed, link, number))

    monkeypatch.setattr(Link, "_on_welcome", welcomed_late)
    dialler.dial(listener.listen(("tcp://127.0.0.1:*",))[0], "listener", wide_area=False)
    end = time.monotonic() + 10
    loop.run(until=lambda: bool(heard) or time.monotonic() > end)
    assert heard == [Kind.CONTROL if lane == "control" else Kind.RESULT]
    for transport in (listener, dialler):
        transport.close(0)
    loop.close()


def _transport(
    loop: Loop, name: str, on_message: Handler, on_reconnect: Callable[[Link, Lane], None] = lambda _, __: None
) -> Transport:
    return Transport(
        loop, job=7, who={"process": name, "party": "A", "role": "worker"}, keys=None, on_message=on_message,
        on_link=lambda _: None, on_reconnect=on_reconnect, events=EventLog(None), slice_bytes=2**20,
    )  # fmt: skip


def _say(link: Link, lane: Lane) -> None:
    """Send a message on this lane."""
    if lane == "control":
        link.control("word")
    else:
        link.send(Header(kind=Kind.RESULT, length=1, size=1), memoryview(bytes(4)))


def test_a_process_has_one_link_whatever_its_connections_and_another_in_each_life() -> None:
    """Plane and rank tell apart in which of its roles a process dials; a second start of it is no new connection."""
    loop, heard = Loop(), list[Link]()
    listener = _transport(loop, "listener", lambda link, _, __: heard.append(link))
    endpoint = listener.listen(("tcp://127.0.0.1:*",))[0]
    first, second = (_transport(loop, "A/worker:0", lambda _, __, ___: None) for _ in range(2))
    links = [
        first.dial(endpoint, "listener", wide_area=False, plane="local", rank=0),
        first.dial(endpoint, "listener", wide_area=False, plane="global", rank=0),
        second.dial(endpoint, "listener", wide_area=False, plane="local", rank=0),
    ]
    end = time.monotonic() + 30
    loop.run(until=lambda: all(link.lanes.all_up for link in links) or time.monotonic() > end)
    assert [link.name for link in listener.links] == ["A/worker:0"] * 3
    assert sorted(link.hello["plane"] for link in listener.links) == ["global", "local", "local"]
    for lane in LANES:  # a connection of its own for each lane
        socket, _ = links[0].lanes._sockets[lane]
        socket.disconnect(endpoint)
        socket.connect(endpoint)
        links[0].lanes.down(lane)
    loop.run(until=lambda: links[0].lanes.all_up or time.monotonic() > end)
    links[0].control("word")
    loop.run(until=lambda: bool(heard) or time.monotonic() > end)
    assert len(listener.links) == 3
    assert heard[0].hello["plane"] == "local" and heard[0].hello["life"] == first.who["life"]
    for transport in (listener, first, second):
        transport.close(0)
    loop.close()
