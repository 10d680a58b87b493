"""The state server's HTTP interface, used as by ESync's own workers, and by malicious clients."""

import contextlib
import json
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from geomx_cli.core import bounded_http
from geomx_cli.core.bounded_http import BoundedThreads
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.algorithms._esync_http import serve
from geomx_cli.runtime.algorithms.esync import EsyncServer


@pytest.fixture
def port() -> Iterator[int]:
    """The port of a state server."""
    server = serve("127.0.0.1", 0)
    yield server.port
    server.close()


def post(port: int, path: str, **fields: object) -> bytes:
    """The body of the answer as a worker gets it."""
    body = urllib.parse.urlencode(fields).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", body, timeout=240) as answer:
        assert answer.status == 200
        return bytes(answer.read())


def apply(port: int, **fields: object) -> int:
    answer = json.loads(post(port, "/apply/", **fields))
    assert list(answer) == ["ready"] and type(answer["ready"]) is int
    return int(answer["ready"])


def home(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=240) as answer:
        return dict(json.loads(answer.read()))


def refused(port: int, path: str, body: bytes | None) -> tuple[int, str]:
    """Status and message of an error answer."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", body, timeout=240)
    with caught.value as answer:
        return answer.code, answer.read().decode()


def spoken(port: int, *pieces: bytes, end: bool = False) -> bytes:
    """All bytes returned for these."""
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        for piece in pieces:
            connection.sendall(piece)
        if end:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_two_rounds_of_three_workers_whose_clocks_differ() -> None:
    ours = [1_700_000_000.0]
    skews = [0.0, -40.0, 3_600.0]  # how far each worker's clock is ahead of ours
    server = serve("127.0.0.1", 0, clock=lambda: ours[0])
    port = server.port

    def ask(now: float, r: int, k: int, c: float) -> int:
        ours[0] = 1_700_000_000.0 + now
        return apply(port, r=r, k=k, c=c, te=ours[0] + skews[r])

    assert post(port, "/init/", num_workers=3, epsilon=0.5) == b""
    assert [ask(0.0, 0, 0, 0.125), ask(0.0, 1, 0, 0.25), ask(0.0, 2, 0, 3.5)] == [0, 0, 0]
    assert [ask(0.125, 0, 1, 0.125), ask(2.75, 0, 22, 0.125), ask(2.875, 0, 23, 0.125)] == [0, 0, 0]
    assert [ask(2.75, 1, 11, 0.25), ask(3.0, 0, 24, 0.125), ask(3.0, 1, 12, 0.25)] == [0, 1, 1]
    assert ask(3.5, 2, 1, 3.5) == 1
    start = 1_700_000_000.0
    assert home(port) == {
        "num_workers": 3,
        "t": 1,
        "epsilon": 0.5,
        "records": [
            [0, 24, 0.125, start + 3.0, True, 1],
            [1, 12, 0.25, start + 3.0 - 40.0, True, 1],
            [2, 1, 3.5, start + 3.5 + 3_600.0, True, 1],
        ],
    }
    ours[0] = start + 4.0
    assert post(port, "/reset/", r=0, t=2, te=start + 4.0) == b""
    assert [ask(4.125, 0, 1, 0.125), home(port)["t"]] == [0, 2]
    ours[0] = start + 4.25
    skews[2] = -7.0  # its clock was corrected
    post(port, "/reset/", r=2, t=2, te=start + 4.25 - 7.0)
    post(port, "/reset/", r=1, t=2, te=start + 4.25 - 40.0)
    assert [ask(7.0, 0, 22, 0.125), ask(7.25, 0, 23, 0.125), ask(7.75, 2, 1, 3.5)] == [0, 1, 1]
    server.close()


def test_an_age_counts() -> None:
    ours = [100.0]
    server = serve("127.0.0.1", 0, clock=lambda: ours[0])
    post(server.port, "/init/", num_workers=2, epsilon=0.25)
    post(server.port, "/reset/", r=1, t=1, te=500.0)  # its clock is 400 s ahead
    ours[0] = 103.0
    assert apply(server.port, r=1, k=0, c=4.0, te=501.0) == 0  # so this was at 101, and its step ends at 105
    ours[0] = 104.0
    assert apply(server.port, r=0, k=3, c=0.75, te=104.0) == 0
    ours[0] = 104.125
    assert apply(server.port, r=0, k=4, c=0.75, te=104.0) == 1
    server.close()


def test_workers_at_the_same_time(port: int) -> None:
    post(port, "/init/", num_workers=8, epsilon=0.5)
    answers: list[int] = []

    def work(rank: int) -> None:
        for k in range(10):
            answers.append(apply(port, r=rank, k=k, c=1000.0 + rank, te=time.time()))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 70
    assert [record[:3] for record in home(port)["records"][:7]] == [[r, 9, 1000.0 + r] for r in range(7)]


def test_init_has_the_references_defaults_and_begins_anew(port: int) -> None:
    assert refused(port, "/apply/", b"r=0&k=0&c=0.1&te=0")[0] == 400
    post(port, "/init/")
    post(port, "/reset/", r=5, t=7, te=12.5)
    assert home(port)["records"][5] == [5, 0, 0, 12.5, False, 7]
    post(port, "/init/")
    records = [[r, 0, 0, 0, False, 1] for r in range(6)]
    assert home(port) == {"num_workers": 6, "t": 1, "epsilon": 0.5, "records": records}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/apply/", "r=0&k=1&c=0.1", "field te is missing"),
        ("/apply/", "", "field r is missing"),
        ("/apply/", "r=3&k=1&c=0.1&te=5", "rank"),
        ("/apply/", "r=-1&k=1&c=0.1&te=5", "rank"),
        ("/apply/", "r=0.5&k=1&c=0.1&te=5", "r is '0.5'"),
        ("/apply/", "r=0&k=-1&c=0.1&te=5", "number of steps"),
        ("/apply/", "r=0&k=" + "9" * 500 + "&c=0.1&te=5", "number of steps"),
        ("/apply/", "r=0&k=1&c=nan&te=5", "c is 'nan'"),
        ("/apply/", "r=0&k=1&c=-1&te=5", "c is '-1'"),
        ("/apply/", "r=0&k=1&c=0.1&te=inf", "te is 'inf'"),
        ("/apply/", "r=0&k=1&c=0.1&te=1e300", "te is '1e300'"),
        ("/apply/", "r=0&k=1&c=fast&te=5", "c is 'fast'"),
        ("/apply/", "r=0&r=1&k=1&c=0.1&te=5", "twice"),
        ("/apply/", '{"r": 0, "k": 1, "c": 0.1, "te": 5}', "no form"),
        ("/apply/", "&".join(f"x{i}=1" for i in range(17)), "no form"),
        ("/apply/", "r=%ff\ud800&k=1", "no form"),
        ("/reset/", "r=0&te=5", "field t is missing"),
        ("/reset/", "r=0&t=0&te=5", "round"),
        ("/reset/", "r=0&t=2&te=nan", "te is 'nan'"),
        ("/init/", "num_workers=0", "number of workers"),
        ("/init/", "num_workers=1000000000", "number of workers"),
        ("/init/", "num_workers=3&epsilon=-1", "epsilon is '-1'"),
    ],
)
def test_bad_fields(port: int, path: str, body: str, says: str) -> None:
    post(port, "/init/", num_workers=3)
    before = home(port)
    status, sentence = refused(port, path, body.encode(errors="surrogatepass"))
    assert status == 400 and says in sentence and "\n" not in sentence, sentence
    assert home(port) == before


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/nowhere/", None, 404),
        ("/apply", b"r=0", 404),
        ("//apply/", b"r=0&k=0&c=0&te=0", 400),
        ("/apply/", None, 405),
        ("/", b"", 405),
        ("/apply/", b"r=0&k=1&c=0.1&te=5&x=" + b"x" * 1_100, 413),
        ("/apply/", b"x" * 300_000, 413),
    ],
)
def test_wrong_requests(port: int, path: str, body: bytes | None, status: int) -> None:
    assert refused(port, path, body)[0] == status


def test_what_is_no_http(port: int) -> None:
    post(port, "/init/", num_workers=3)
    cases = [
        (b"POST /init/ HTTP/1.1\r\n\r\n", b" 411 "),
        (b"POST /init/ HTTP/1.1\r\nContent-Length: -5\r\n\r\n", b" 411 "),
        (b"POST /init/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b" 411 "),
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", b" 431 "),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n", b" 431 "),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n", b" 431 "),
        (b"DELETE / HTTP/1.1\r\n\r\n", b" 501 "),
        (b"GET / HTTP/2.5\r\n\r\n", b" 505 "),
        (b"\x16\x03\x01\x02\x00 \xff\n\r\n", b" 400 "),
        (b"POST /init/ HTTP/1.1\r\nContent-Length: 30\r\n\r\nnum_workers=9", b""),
    ]
    for said, status in cases:
        first = spoken(port, said, end=True).partition(b"\r\n")[0]
        assert status in first and bool(status) == bool(first), (said[:60], first)
    assert home(port)["num_workers"] == 3


def test_slow_clients_are_let_go_and_hinder_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "LIMIT", 0.5)
    post(port, "/init/", num_workers=3)
    pieces = [b"", b"POST /init/ HT", b"POST /init/ HTTP/1.1\r\nContent-Length: 1000\r\n\r\nnum"]
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(12)]
        for number, connection in enumerate(slow):
            connection.sendall(pieces[number % 3])
        assert home(port)["num_workers"] == 3
        assert b" 408 " in trickled(slow.pop())
        for connection in slow:
            assert b" 408 " in connection.recv(65536)
    assert home(port)["num_workers"] == 3


def trickled(connection: socket.socket) -> bytes:
    """The bytes returned to a client that sends forever, a byte at a time."""
    connection.settimeout(0.05)
    while True:
        connection.sendall(b"x")
        with contextlib.suppress(TimeoutError):
            return connection.recv(65536)


def test_more_connections_than_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "LIMIT", 0.5)
    monkeypatch.setattr(BoundedThreads, "most", 4)
    server = serve("127.0.0.1", 0)
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
        assert home(server.port)["num_workers"] == 0
    server.close()


def test_a_closed_server_refuses_connections() -> None:
    server = serve("127.0.0.1", 0)
    server.close()
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/", timeout=240)


def test_where_it_cannot_listen(port: int) -> None:
    for host, taken in [("127.0.0.1", port), ("192.0.2.1", 0), ("no-such-host.invalid", 0)]:
        with pytest.raises(InvalidSettings, match=f"cannot listen for ESync's workers on {host} port {taken}"):
            serve(host, taken)


def test_ipv6() -> None:
    try:
        server = serve("::1", 0)
    except InvalidSettings:
        pytest.skip("this machine has no IPv6")
    with urllib.request.urlopen(f"http://[::1]:{server.port}/", timeout=240) as answer:
        assert json.loads(answer.read())["t"] == 1
    server.close()


@pytest.mark.parametrize("place", ["0.0.0.0:8000", "[::]:8000", "192.168.0.1:8000", "localhost:8000"])
def test_beyond_loopback_it_is_opened_in_a_trusted_network_only(place: str) -> None:
    with pytest.raises(InvalidSettings, match=r"HTTP has no password.*GEOMX_INSECURE=1"):
        EsyncServer("global", None, 1).open_http(place, insecure=False)
