"""Messages of unknown, stale or broken peers are refused and counted, and do not affect training."""

import contextlib
import json
import socket
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import zmq
from cluster import Cluster, free_ports, until
from rounds import SCRIPT, assert_equal, expected, found_in

from geomx_cli.contract import security
from geomx_cli.core.event_log import EventLog
from geomx_cli.ps.net.lanes import LANES, Lane, Lanes
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.payload import view
from geomx_cli.ps.net.sockets import Sockets
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.net.wire import (
    BadMessage,
    Header,
    Kind,
    Place,
    decode_header,
    encode_body,
    encode_header,
    job_number,
)

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)


def attack(port: int) -> None:
    """Send all kinds of invalid input over new connections."""
    noise = np.random.default_rng(1)
    for attempt in range(20):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(noise.bytes(1000) if attempt % 2 else GREETING[: 10 + attempt])
    with socket.create_connection(("127.0.0.1", port)) as raw:
        raw.sendall(GREETING + b"\2" + struct.pack(">Q", 2**32) + b"x" * 1000)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    good = encode_header(Header(job=job_number(""), kind=Kind.EXCHANGE, length=10, round=1, contributors=(0,)))
    stale = encode_header(Header(job=job_number("yesterday"), topic="hello"))
    unwanted = ([b""], [b"garbage"], [good[:20]], [good, b"x" * 40], [good, b"x", b"y"], [stale, b""], [b"x" * 100_000])
    for frames in unwanted:
        dealer.send_multipart(frames)
    dealer.close(500)
    context.term()


def test_a_root_under_attack_goes_on_and_counts(cluster: Cluster, tmp_path: Path) -> None:
    port = free_ports(1)[0]
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"),
        "SERVER_OPTIMIZER": "1",
        "ROUNDS": "5",
        "SLOW": "0.2",
        "GEOMX_JOB_DIR": str(tmp_path),
        "GEOMX_HEARTBEAT": "0.2",
    }
    cluster.launch(SCRIPT, root_env={"GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_PROCESS": "root"})

    def attacked() -> bool:
        try:
            attack(port)
        except ConnectionRefusedError:
            return False
        return True

    until(attacked, state=cluster.outputs)
    cluster.finish()
    found = found_in(tmp_path)
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))
    events = [json.loads(line) for line in (tmp_path / "events/root.jsonl").read_text().splitlines()]
    refused = [item["refused"] for item in events if "refused" in item][-1]
    assert refused["malformed"] >= 6
    assert refused["handshake"] >= 1
    assert any(item["event"] == "warning" for item in events)


@pytest.mark.parametrize("whose", ["another job's", "none"])
def test_only_keys_of_the_job_are_let_in(tmp_path: Path, whose: str) -> None:
    ours = _rings(tmp_path, "job")
    theirs = {"another job's": _rings(tmp_path, "other")["friend"], "none": None}[whose]
    loop = Loop()
    heard: list[str] = []
    listener = _transport(loop, "listener", ours["listener"], heard)
    endpoint = listener.listen(("tcp://127.0.0.1:*",))[0]
    friend = _transport(loop, "friend", ours["friend"], heard)
    friend.dial(endpoint, "listener", wide_area=False)
    if theirs is not None:  # it knows the listener's public key, but its own key is of another job
        theirs = security.KeyRing(**{**vars(theirs), "server_public": ours["listener"].server_public})
    unknown = _transport(loop, "unknown", theirs, heard)
    unknown.dial(endpoint, "listener", wide_area=False)
    end = time.monotonic() + 10
    refused = "key" if whose != "none" else "handshake"
    loop.run(until=lambda: bool(heard and listener.counters[refused]) or time.monotonic() > end)
    assert heard == ["friend"]
    assert listener.counters[refused] >= 1
    for transport in (listener, friend, unknown):
        transport.close(0)
    loop.close()


def test_a_key_is_good_for_one_name_alone(tmp_path: Path) -> None:
    ours = _rings(tmp_path, "job")
    loop = Loop()
    heard: list[str] = []
    listener = _transport(loop, "listener", ours["listener"], heard)
    endpoint = listener.listen(("tcp://127.0.0.1:*",))[0]
    liar = _transport(loop, "another", ours["friend"], heard)
    liar.dial(endpoint, "listener", wide_area=False)
    end = time.monotonic() + 30
    loop.run(until=lambda: listener.counters["malformed"] >= 2 or time.monotonic() > end)  # the hello of each lane
    friend = _transport(loop, "friend", ours["friend"], heard)
    friend.dial(endpoint, "listener", wide_area=False)
    loop.run(until=lambda: bool(heard) or time.monotonic() > end)
    assert heard == ["friend"] and listener.counters["malformed"] >= 2
    assert [link.name for link in listener.links] == ["friend"]
    for transport in (listener, liar, friend):
        transport.close(0)
    loop.close()


def test_a_second_hello_on_a_connection_lets_nothing_be_forgotten(tmp_path: Path) -> None:
    """Nobody would ask for it again."""
    ours = _rings(tmp_path, "job")
    loop = Loop()
    heard: list[str] = []
    listener = _transport(loop, "listener", ours["listener"], heard)
    member = _transport(loop, "friend", ours["friend"], heard)
    link = member.dial(listener.listen(("tcp://127.0.0.1:*",))[0], "listener", wide_area=False)
    end = time.monotonic() + 30
    loop.run(until=lambda: bool(heard and link.lanes.all_up) or time.monotonic() > end)
    own = listener.links[0]
    own.send(Header(kind=Kind.RESULT, length=10, size=10), memoryview(bytes(40)))
    held = own.window.held
    for number in range(100, 150):
        for lane in LANES:
            header = Header(job=7, topic="hello", request=number, place=Place.FRAME)
            link.lanes.write(lane, [encode_header(header), encode_body({**member.who, "lane": lane})])
    greeted = own.lanes._greeted
    loop.run(until=lambda: [greeted.get(lane) for lane in LANES] == [149, 149] or time.monotonic() > end)
    assert own.window.held == held > 0
    link.lanes._sockets["control"][0].disconnect(link.endpoint)  # a new connection says hello anew
    link.lanes._sockets["control"][0].connect(link.endpoint)
    heard.clear()
    loop.run(until=lambda: "friend" in heard or time.monotonic() > end)
    assert "friend" in heard and not listener.counters["malformed"]
    for transport in (listener, member):
        transport.close(0)
    loop.close()


def test_connections_that_do_not_say_who_they_are_cost_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve send up to the maximum message size, one sends nothing; identified peers stay connected."""
    for module in ("connections", "sockets"):
        monkeypatch.setattr(f"geomx_cli.ps.net.{module}.MAX_SECONDS", 3.0)
    ours = _rings(tmp_path, "job")
    loop = Loop()
    heard: list[str] = []
    listener = _transport(loop, "listener", ours["listener"], heard)
    endpoint = listener.listen(("tcp://127.0.0.1:*",))[0]
    friend = _transport(loop, "friend", ours["friend"], heard)
    link = friend.dial(endpoint, "listener", wide_area=False)
    loop.run(until=lambda: bool(heard))
    port, before = int(endpoint.rpartition(":")[2]), _resident()
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0CURVE" + bytes(47)
    peaks, attackers = [before], []
    for size in [2**26] + [15 * 2**20] * 11:
        attackers.append(socket.create_connection(("127.0.0.1", port)))
        attackers[-1].sendall(greeting + b"\6" + struct.pack(">Q", size))
        threading.Thread(target=_flood, args=(attackers[-1], size), daemon=True).start()
    attackers.append(socket.create_connection(("127.0.0.1", port)))
    loop.every(0.01, lambda: peaks.append(_resident()))
    end = time.monotonic() + 60
    loop.run(until=lambda: all(map(_has_ended, attackers)) or time.monotonic() > end)
    assert all(map(_has_ended, attackers))
    assert listener.counters["handshake"] >= len(attackers)
    assert max(peaks) - before < 200 * 2**20, "they would send 229 MB"
    link.control("still here")
    loop.run(until=lambda: len(heard) > 1 or time.monotonic() > end)
    assert heard == ["friend", "friend"], "it was never connected anew"
    for ended in (listener, friend, *attackers):
        ended.close()
    loop.close()


def _has_ended(stream: socket.socket) -> bool:
    """Whether the other end has closed it."""
    try:
        while stream.recv(1000, socket.MSG_DONTWAIT):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _resident() -> int:
    """Resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _flood(stream: socket.socket, size: int) -> None:
    chunk = bytes(2**16)
    with contextlib.suppress(OSError):
        for _ in range(size // len(chunk)):
            stream.sendall(chunk)


def test_a_hello_is_the_first_one_though_its_descriptor_is_used_again() -> None:
    """Two connections have one descriptor, one after the other. Both hellos are read after both were accepted. What was
    sent between them went to the first one, and would stay in the window.
    """
    loop = Loop()
    sockets = Sockets(loop, None, lambda *_: None, 1000)
    descriptors: list[int] = []

    def read(router: "zmq.Socket[bytes]") -> None:
        _, frame = router.recv_multipart(copy=False)
        descriptors.append(frame.get(zmq.SRCFD))

    port = sockets.listen(("tcp://127.0.0.1:*",), read, lambda _: None)[0].rpartition(":")[2]
    ready = b"\5READY\x0bSocket-Type\0\0\0\6DEALER"
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", int(port)), 10) as stream:
            stream.sendall(GREETING + b"\4" + bytes([len(ready)]) + ready)
            received = b""
            while b"READY" not in received:
                received += stream.recv(1000)
            stream.sendall(b"\0\5hello")
            stream.shutdown(socket.SHUT_WR)
            while stream.recv(1000):  # until the other end has closed it too
                pass
    end = time.monotonic() + 10
    loop.run(until=lambda: len(descriptors) == 2 or time.monotonic() > end)
    assert descriptors[0] == descriptors[1]
    found = []
    for descriptor in (*descriptors, *descriptors):
        found.append(sockets.awaits_hello(descriptor))
        sockets.identified(descriptor)
    assert found == [True, True, False, False]
    sockets.close(0)
    loop.close()


def test_a_hello_that_is_lost_is_said_on_another_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stands, and the lane would never be used."""
    monkeypatch.setattr("geomx_cli.ps.net.transport.UNWELCOMED", 0.3)
    loop = Loop()
    heard: list[str] = []
    listener = _transport(loop, "listener", None, heard)
    member = _transport(loop, "friend", None, heard)
    lost = []
    greet = Lanes.greet

    def loses_the_first(lanes: Lanes, lane: Lane) -> None:
        if lane == "tensors" and not lost:
            lost.append(lane)
        else:
            greet(lanes, lane)

    monkeypatch.setattr(Lanes, "greet", loses_the_first)
    link = member.dial(listener.listen(("tcp://127.0.0.1:*",))[0], "listener", wide_area=False)
    end = time.monotonic() + 30
    loop.run(until=lambda: link.lanes.all_up or time.monotonic() > end)
    assert lost and link.lanes.all_up
    for transport in (listener, member):
        transport.close(0)
    loop.close()


def test_what_cannot_be_read_does_not_stay_in_its_sender_s_window() -> None:
    """Otherwise the sender waits for ever: its window never opens again."""
    loop = Loop()
    heard: list[str] = []
    listener = _transport(loop, "listener", None, heard)
    member = _transport(loop, "friend", None, heard, party="B")
    link = member.dial(listener.listen(("tcp://127.0.0.1:*",))[0], "listener", wide_area=True)
    end = time.monotonic() + 30
    loop.run(until=lambda: link.lanes.all_up or time.monotonic() > end)
    for number in range(3):
        bad = Header(kind=Kind.EXCHANGE, length=10, size=10, request=number + 1, weight=-1.0)
        link.send(bad, memoryview(bytes(40)))
    assert link.window.held == link.window.under_way == 120
    loop.run(until=lambda: link.window.held == link.window.under_way == 0 or time.monotonic() > end)
    assert link.window.held == link.window.under_way == 0
    assert listener.counters["malformed"] == 1, "they were one message"
    for transport in (listener, member):
        transport.close(0)
    loop.close()


def _rings(directory: Path, job: str) -> dict[str, security.KeyRing]:
    rings = {}
    callers = {"listener": {"friend": security.Identity("friend", "worker", 0)}, "friend": None}
    for name, content in security.generate(job, callers).items():
        path = directory / f"{job}-{name}.key"
        path.touch(0o600)
        path.write_bytes(content)
        ring = security.load(str(path))
        assert ring is not None
        rings[name] = ring
    return rings


def _transport(
    loop: Loop, name: str, keys: security.KeyRing | None, heard: list[str], party: str = "A"
) -> Transport:
    return Transport(
        loop,
        job=7,
        who={"process": name, "party": party, "role": "worker"},
        keys=keys,
        on_message=lambda link, header, payload: heard.append(link.name),
        on_link=lambda _: None,
        on_reconnect=lambda link, lane: link.control("greet") if link.dialled and lane == "control" else None,
        events=EventLog(None),
        slice_bytes=2**20,
    )


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(security.generate("job", {"a": {}})["a"])
    path.chmod(0o644)
    with pytest.raises(Exception, match="others can read"):
        security.load(str(path))


def test_headers_out_of_bounds_are_refused() -> None:
    good = Header(job=1, kind=Kind.EXCHANGE, length=4)
    assert decode_header(encode_header(good), 1) == good
    for change in (
        {"version": 99}, {"job": 2}, {"length": 2**40}, {"dtype": 99}, {"key": -1}, {"topic": "x" * 200},
        {"contributors": (70_000,)}, {"contributors": tuple(range(5000))}, {"credit": 2**60},
        {"weight": float("inf")}, {"hyper": {"wd": float("nan")}},
    ):  # fmt: skip
        fields = {name: getattr(good, name) for name in good.__struct_fields__} | change
        with pytest.raises(BadMessage):
            decode_header(encode_header(Header(**fields)), 1)
    with pytest.raises(BadMessage, match="elements"):
        view(good, memoryview(b"abc"))
