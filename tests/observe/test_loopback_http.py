"""The listener of the dashboard and of the metrics, which every account of this machine can reach."""

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterable
from typing import Any

from geomx_cli.core.bounded_http import LoopbackServer


def answer(environ: dict[str, Any], start: Any) -> Iterable[bytes]:
    """A WSGI application."""
    start("200 OK", [("Content-Type", "text/plain")])
    return [environ["PATH_INFO"].encode()]


def test_connections_that_trickle_take_few_threads_and_hinder_nobody() -> None:
    """The oldest ones are closed for new ones, so that a request is answered at once."""
    before = threading.active_count()
    with contextlib.closing(LoopbackServer(answer, 0, "")) as server, contextlib.ExitStack() as stack:
        slow = []
        for number in range(300):
            slow.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10)))
            with contextlib.suppress(ConnectionError):
                slow[-1].sendall(b"GET /metrics HT"[: number % 16])
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/mine", timeout=240) as answered:
            assert answered.read() == b"/mine"
        assert threading.active_count() - before <= 1 + 64
        assert not any(map(is_open, slow[: 300 - 64]))


def is_open(stream: socket.socket) -> bool:
    """Whether the other end has not closed it."""
    try:
        return bool(stream.recv(1, socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except OSError:
        return False
