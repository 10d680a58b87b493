"""What a link sends on a new connection, with an upstream client and a transport that records."""

import pytest
from bench import RecordingTransport

from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.wire import Header, Kind

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
    link.restart(lane, lambda: upstream.repeat(link, lane))
    assert transport.sent == (list(range(1, in_flight + 1)) if lane == "tensors" else [])
    for received in range(1, in_flight + COUNT + 1):
        link.credit(received * SLICE)
    assert transport.sent == list(range(1, COUNT + 1))
