"""A process of the parameter server: its loop, its transport, its membership of one or two planes, its requests.

A node that fails tells its schedulers why, and so everybody; a node that hears of a failure, or no longer hears its
scheduler, raises PeerLost in `run`. Nothing here waits without a limit.
"""

import os
import socket
from collections.abc import Callable
from typing import Any

from geomx_cli.errors import GeomxError, InvalidSettings, TimedOut
from geomx_cli.events import EventLog
from geomx_cli.ps import security
from geomx_cli.ps.config import NodeSettings, PlaneSettings
from geomx_cli.ps.link import Link
from geomx_cli.ps.loop import Loop, Timer
from geomx_cli.ps.membership import Membership
from geomx_cli.ps.partition import NEAR
from geomx_cli.ps.shaping import Shaper
from geomx_cli.ps.transport import Transport
from geomx_cli.ps.wire import BadMessage, Header, Kind, decode_body, job_number

__all__ = ["Node", "Request"]

Body = dict[str, Any]
Answer = Callable[[Body], None]
Failed = Callable[[GeomxError], None]


class Request:
    """A control request from a peer, to be answered once, now or later."""

    __slots__ = ("_number", "body", "link", "topic")

    def __init__(self, link: Link, topic: str, body: Body, number: int) -> None:
        self.link = link
        self.topic = topic
        self.body = body
        self._number = number

    def answer(self, body: Body | None = None) -> None:
        """Send the answer."""
        self.link.control("answer", body or {}, self._number)

    def refuse(self, error: GeomxError) -> None:
        """Answer with an error, which is raised where the request was made."""
        self.link.control("answer", {"error": error.message, "hint": error.hint}, self._number)


class Node:
    """Everything that scheduler, server and client have in common. Used by the loop's thread only.

    `on_tensor` gets PUSH, PULL, EXCHANGE and RESULT messages; `on_request` gets control requests; `on_link` is told of
    peers that dial.
    """

    def __init__(
        self,
        settings: NodeSettings,
        events: EventLog,
        *,
        on_tensor: Callable[[Link, Header, memoryview | None], None],
        on_request: Callable[[Request], None],
        on_link: Callable[[Link], None] = lambda _: None,
        on_reconnect: Callable[[Link], None] = lambda _: None,
    ) -> None:
        self.settings = settings
        self.events = events
        self.loop = Loop()
        self.timeout = settings.number("timeout")
        self.telemetry: Body = {"state": "starting", "round": 0}
        self.memberships: list[Membership] = []
        self.error: GeomxError | None = None
        self._on_tensor = on_tensor
        self._on_request = on_request
        self._requests: dict[int, tuple[Answer, Failed, Timer]] = {}
        self._request_number = 0
        self.process = settings.process or f"{settings.role}@{socket.gethostname()}:{os.getpid()}"
        self.keys = security.load(settings.key_file)
        self.transport = Transport(
            self.loop,
            job=job_number(settings.job),
            who={
                "process": self.process,
                "party": settings.party,
                "role": settings.role,
                "host": settings.host,
            },
            keys=self.keys,
            on_message=self._on_message,
            on_link=on_link,
            on_reconnect=on_reconnect,
            events=events,
            slice_bytes=4 * int(settings.number("slice_elements") or NEAR),
            window_bytes=int(settings.number("window")),
            shaper=Shaper(settings.text("wan"), settings.wan_share),
        )

    def listen(self, fallback: PlaneSettings | None) -> tuple[str, ...]:
        """Bind the planned endpoints, or one on the own address of a process started by hand; returns what others dial.

        Raises InvalidSettings when the address is not loopback and there are no keys.
        """
        planned = self.settings.bind
        endpoints = planned or (f"tcp://{self.own_address(fallback)}:{self.settings.port or '*'}",)
        self.guard(endpoints)
        bound = self.transport.listen(endpoints)
        return (self.settings.advertise or bound) if planned else bound

    def guard(self, endpoints: tuple[str, ...]) -> None:
        """Refuse to listen beyond this machine without keys."""
        for endpoint in endpoints:
            local = endpoint.startswith(("ipc:", "tcp://127.", "tcp://localhost:", "tcp://[::1]:"))
            if self.keys is None and not local and not self.settings.insecure:
                raise InvalidSettings(
                    f"refusing to listen on {endpoint} without keys",
                    "start the job with geomx launch, which makes keys, or set GEOMX_INSECURE=1 in a network you trust",
                )

    def own_address(self, plane: PlaneSettings | None) -> str:
        """DMLC_NODE_HOST, the address of DMLC_INTERFACE, or the one that faces the scheduler."""
        settings = self.settings
        if settings.node_host:
            return f"[{settings.node_host}]" if ":" in settings.node_host else settings.node_host
        if settings.interface:
            return _interface_address(settings.interface)
        if plane is None or plane.uri in ("127.0.0.1", "localhost", "::1"):
            return "127.0.0.1"
        family = socket.AF_INET6 if ":" in plane.uri else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((plane.uri, plane.port))
            address = str(probe.getsockname()[0])
        return f"[{address}]" if family == socket.AF_INET6 else address

    def join(
        self, plane: PlaneSettings, role: str, on_roster: Callable[[Membership], None], **facts: Any
    ) -> Membership:
        """Register with a plane's scheduler; `on_roster` is called when all members have."""
        membership = Membership(self, plane, role, facts, on_roster)
        self.memberships.append(membership)
        return membership

    def request(self, link: Link, topic: str, body: Body, answer: Answer, failed: Failed, limit: float = 0.0) -> None:
        """Ask `link`; exactly one of `answer` and `failed` is called later. `limit` is in seconds; 0: the timeout."""
        self._request_number += 1
        number, limit = self._request_number, limit or self.timeout

        def expire() -> None:
            del self._requests[number]
            failed(TimedOut(f"no answer from {link.name} to {topic!r} within {limit:g} s"))

        self._requests[number] = (answer, failed, self.loop.call_later(limit, expire))
        link.control(topic, body, number)

    def fail(self, error: GeomxError) -> None:
        """Remember why this process fails, tell every scheduler, and end `run`."""
        if self.error is None:
            self.error = error
            for membership in self.memberships:
                membership.report_failure(error)
            self.loop.stop()

    def fail_requests(self, error: GeomxError) -> None:
        """Tell whoever waits for an answer that none will come."""
        requests, self._requests = self._requests, {}
        for _, failed, timer in requests.values():
            timer.cancel()
            failed(error)

    def run(self) -> None:
        """Run the loop until stopped. Raises what made the node fail."""
        self.loop.every(self.settings.number("heartbeat"), self._tick)
        self.loop.run()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Say the last words and close the sockets."""
        self.transport.close()
        self.loop.close()

    def _tick(self) -> None:
        counters = self.transport.counters
        refused = {name: count for name, count in counters.items() if " from " not in name}
        self.telemetry["bytes"] = self.transport.traffic()
        if refused:
            self.telemetry["refused"] = refused
        self.events.write("telemetry", **self.telemetry)
        for membership in self.memberships:
            membership.beat(self.telemetry)

    def _on_message(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if header.kind != Kind.CONTROL:
            try:
                self._on_tensor(link, header, payload)
            except GeomxError as error:
                self.fail(error)
            return
        body = decode_body(payload) if payload is not None else {}
        if header.topic == "answer":
            self._on_answer(header.request, body)
            return
        for membership in self.memberships:
            if membership.link is link:
                membership.on_control(header.topic, body)
                return
        self._on_request(Request(link, header.topic, body, header.request))

    def _on_answer(self, number: int, body: Body) -> None:
        if number not in self._requests:
            raise BadMessage("an answer to no request")
        answer, failed, timer = self._requests.pop(number)
        timer.cancel()
        if "error" in body:
            failed(InvalidSettings(str(body["error"]), str(body.get("hint", ""))))
        else:
            answer(body)


def _interface_address(name: str) -> str:
    import psutil

    addresses = psutil.net_if_addrs().get(name)
    if addresses is None:
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise InvalidSettings(f"DMLC_INTERFACE={name}: no such interface", f"this machine has {known}")
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in addresses:
            if entry.family == family:
                return entry.address if family == socket.AF_INET else f"[{entry.address.split('%')[0]}]"
    raise InvalidSettings(f"DMLC_INTERFACE={name} has no IP address", "choose another, or set DMLC_NODE_HOST")
