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
