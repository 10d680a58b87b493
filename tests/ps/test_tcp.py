"""The kernel's state of TCP connections."""

import os
import socket
import time
from collections.abc import Iterator

import pytest

from geomx_cli.ps.net.connections import Connection

Pair = tuple[socket.socket, socket.socket]


def connected() -> Pair:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection, closed at the end."""
    near, far = connected()
    with near, far:
        yield near, far


def test_what_is_acknowledged_or_not_sent_is_not_unanswered(pair: Pair) -> None:
    """The kernel acknowledges for a peer that does not read, until its buffer is full."""
    near, _ = pair
    connection = Connection(near.fileno())
    assert connection.peer == near.getpeername()
    near.setblocking(False)
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            while True:
                near.send(b"x" * 65536)
        connection.unanswered()
        time.sleep(0.3)
    assert connection.unanswered() == 0.0


def test_its_end_is_its_owners(pair: Pair) -> None:
    near, far = pair
    connection = Connection(near.fileno())
    connection.shut_down()
    assert connection.ended and far.recv(1) == b"" and near.recv(1) == b""


def test_a_descriptor_that_is_another_connections_by_now_is_left_alone(pair: Pair) -> None:
    near, _ = pair
    connection = Connection(near.fileno())
    other, peer = connected()
    with other, peer:
        os.dup2(other.fileno(), near.fileno())
        connection.shut_down()
        peer.sendall(b"x")
        assert other.recv(1) == b"x" and connection.unanswered() == 0.0


def test_what_is_no_connection_is_left_alone() -> None:
    connection = Connection(999_999)
    connection.shut_down()
    assert connection.peer is None and connection.unanswered() == 0.0
