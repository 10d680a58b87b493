"""Dials other hosts as the job's processes will, and classifies the results."""

import errno
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from geomx_cli.probe import bandwidth
from geomx_cli.probe.listeners import GREETING, WRONG_TOKEN, read_line

__all__ = ["Target", "dial", "dial_all", "measure"]

_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_SLACK = 0.5
_REPEAT = 0.2  # seconds between datagrams, some of which may be lost


@dataclass(frozen=True)
class Target:
    """Where to dial, by "tcp" or "udp", the listener's token, and the source address ("": chosen by the system)."""

    address: str
    port: int
    token: str
    source: str = ""
    protocol: str = "tcp"


class _Failed(Exception):
    """A failed dial, classified by `kind`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind)
        self.kind, self.detail = kind, detail


def dial_all(targets: Sequence[Mapping[str, Any]], limit: float) -> list[dict[str, Any]]:
    """Dial all concurrently, for at most `limit` seconds; return `kind`, `detail`, `ip` and `round_trip` of each, in
    order.

    `kind` is "ok", "refused", "timeout" (no response), "route" (no route), "forbidden" (rejected by a local rule),
    "name" (not resolvable), "source" (not an address of this host), "silent" (connected, but no response), "other-host"
    (the probe of another host or job), "other" (another program) or "error". `detail` is the system's error text, `ip`
    the resolved address, `round_trip` in seconds.
    """
    results: list[dict[str, Any]] = [_result("timeout") for _ in targets]

    def one(index: int, target: Target) -> None:
        results[index] = dial(target, limit)

    threads = [
        threading.Thread(target=one, args=(index, Target(**target)), daemon=True)
        for index, target in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + limit + _SLACK
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    return list(results)


def dial(target: Target, limit: float) -> dict[str, Any]:
    """Connect, exchange a nonce with the listener, and close; see dial_all for the result."""
    ip = ""
    end = time.monotonic() + limit
    try:
        ip = _resolve(target)
        if target.protocol == "udp":
            return _result("ok", ip=ip, round_trip=_echo(ip, target, end))
        began = time.monotonic()
        with _connect(ip, target, end) as stream:
            connected = time.monotonic()
            _greet(stream, target, "echo 0", end)
            return _result("ok", ip=ip, round_trip=min(connected - began, time.monotonic() - connected))
    except _Failed as failure:
        return _result(failure.kind, failure.detail, ip=ip)


def _echo(ip: str, target: Target, end: float) -> float:
    """Return the seconds until a datagram is answered."""
    nonce = secrets.token_hex(8).encode()
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as made:
            made.settimeout(_REPEAT)
            while (sent := time.monotonic()) < end:
                made.sendto(b" ".join((GREETING, target.token.encode(), nonce)), (ip, target.port))
                with suppress(TimeoutError):
                    if made.recv(64).split() == [GREETING, nonce]:
                        return time.monotonic() - sent
    except OSError as error:
        raise _Failed("error", error.strerror or str(error)) from None
    raise _Failed("timeout")


def measure(target: Target, seconds: float, limit: float) -> dict[str, Any]:
    """Measure bytes per second to (`sent`) and from (`received`) the target, for `seconds` each.

    `limit` is the connect timeout. On failure, `kind` and `detail` are as for `dial`.
    """
    try:
        ip = _resolve(target)
        with _begin(ip, target, f"sink {seconds:g}", limit) as stream:
            bandwidth.send(stream, 2 * seconds + limit)
            stream.settimeout(limit)
            sent = float(read_line(stream).split()[1])
        with _begin(ip, target, f"source {seconds:g}", limit) as stream:
            received = bandwidth.receive(stream, seconds)
    except _Failed as failure:
        return {"kind": failure.kind, "detail": failure.detail, "sent": 0.0, "received": 0.0}
    except (OSError, ValueError, IndexError) as error:
        return {"kind": "error", "detail": str(error), "sent": 0.0, "received": 0.0}
    return {"kind": "ok", "detail": "", "sent": sent, "received": received}


def _result(kind: str, detail: str = "", *, ip: str = "", round_trip: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "detail": detail[:200], "ip": ip, "round_trip": round_trip}


def _resolve(target: Target) -> str:
    try:
        return str(socket.getaddrinfo(target.address, target.port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise _Failed("name", getattr(error, "strerror", "") or str(error)) from None


def _connect(ip: str, target: Target, end: float) -> socket.socket:
    source = (target.source, 0) if target.source else None
    try:
        return socket.create_connection((ip, target.port), max(0.001, end - time.monotonic()), source)
    except TimeoutError:
        raise _Failed("timeout") from None
    except ConnectionRefusedError:
        raise _Failed("refused") from None
    except OSError as error:
        kinds = {**dict.fromkeys(_NO_ROUTE, "route"), **dict.fromkeys(_FORBIDDEN, "forbidden")}
        kinds[errno.EADDRNOTAVAIL] = "source"
        raise _Failed(kinds.get(error.errno or 0, "error"), error.strerror or str(error)) from None


def _begin(ip: str, target: Target, what: str, limit: float) -> socket.socket:
    end = time.monotonic() + limit
    stream = _connect(ip, target, end)
    try:
        _greet(stream, target, what, end)
    except _Failed:
        stream.close()
        raise
    return stream


def _greet(stream: socket.socket, target: Target, what: str, end: float) -> None:
    nonce = secrets.token_hex(8)
    try:
        stream.settimeout(max(0.001, end - time.monotonic()))
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.sendall(f"{GREETING.decode()} {target.token} {nonce} {what}\n".encode())
        answer = read_line(stream)
    except TimeoutError:
        raise _Failed("silent") from None
    except (OSError, ValueError) as error:
        raise _Failed("other", str(error)) from None
    if answer + b"\n" == WRONG_TOKEN:
        raise _Failed("other-host")
    if answer.split() != [GREETING, nonce.encode()]:
        raise _Failed("other", answer[:60].decode(errors="replace"))
