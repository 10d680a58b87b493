"""The ends of a plain TCP connection that measures a link; wan_selftest.py starts them in the sites.

    wan_probe.py sink ADDRESS           prints its port; reads "BEGIN END"; prints {"bytes", "seconds"} of
    then wan_probe.py source ADDRESS PORT    prints "ready"; reads "BEGIN END"; sends from now to END
    wan_probe.py echo ADDRESS           prints its port; returns what it gets until the other end closes
    wan_probe.py ping ADDRESS PORT N    prints {"seconds": [...]} of N round trips of one byte

BEGIN and END are seconds of the monotonic clock, which all processes of a machine share.
"""

import json
import socket
import sys
import time
from collections.abc import Callable

LIMIT = 30.0
CHUNK = 1 << 18
DRAIN = 0.2


def _say(text: str) -> None:
    print(text, flush=True)


def _window() -> tuple[float, float]:
    begin, end = sys.stdin.readline().split()
    return float(begin), float(end)


def _accept(address: str) -> socket.socket:
    with socket.create_server((address, 0)) as server:
        server.settimeout(LIMIT)
        _say(str(server.getsockname()[1]))
        link, _ = server.accept()
    link.settimeout(LIMIT)
    return link


def _connect(address: str, port: str) -> socket.socket:
    link = socket.create_connection((address, int(port)), timeout=LIMIT)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return link


def sink(address: str) -> None:
    """Count the bytes that arrive between the first moments after BEGIN and after END."""
    buffer = bytearray(CHUNK)
    total = first = 0
    started = 0.0
    with _accept(address) as link:
        begin, end = _window()
        while count := link.recv_into(buffer):
            now = time.monotonic()
            total += count
            if not started and now >= begin:
                started, first = now, total
            if now >= end:
                break
    _say(json.dumps({"bytes": total - first, "seconds": now - started if started else 0.0}))


def source(address: str, port: str) -> None:
    payload = memoryview(bytes(CHUNK))
    with _connect(address, port) as link:
        _say("ready")
        _, end = _window()
        try:
            while time.monotonic() < end + DRAIN:
                link.send(payload)
        except OSError:
            pass  # the sink has finished and has closed


def _receive_awake(link: socket.socket) -> bytes:
    """The next received bytes, b"" at the end.

    Polls, because a CPU in deep sleep may wake up 1 ms late, which is not the link's delay.
    """
    link.setblocking(False)
    try:
        give_up = time.monotonic() + LIMIT
        while time.monotonic() < give_up:
            try:
                return link.recv(CHUNK)
            except BlockingIOError:
                continue
        raise TimeoutError("the other end says nothing")
    finally:
        link.settimeout(LIMIT)


def echo(address: str) -> None:
    with _accept(address) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := _receive_awake(link):
            link.sendall(data)


def ping(address: str, port: str, count: str) -> None:
    times = []
    with _connect(address, port) as link:
        for _ in range(int(count)):
            started = time.monotonic()
            link.sendall(b"?")
            _receive_awake(link)
            times.append(time.monotonic() - started)
    _say(json.dumps({"seconds": times}))


if __name__ == "__main__":
    ROLES: dict[str, Callable[..., None]] = {"sink": sink, "source": source, "echo": echo, "ping": ping}
    ROLES[sys.argv[1]](*sys.argv[2:])
