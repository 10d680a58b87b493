"""A process of the parameter server: its loop, its transport, its membership of one or two planes, its requests.

A node that fails tells its schedulers why, and so everybody; a node that hears of a failure, or no longer hears its
scheduler, raises PeerLost in `run`. Nothing here waits without a limit.
"""

import os
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ParamSpec

from geomx_cli.errors import GeomxError, Interrupted, InvalidSettings, PeerLost
from geomx_cli.events import EventLog
from geomx_cli.ps import addresses, security
from geomx_cli.ps.config import NodeSettings, PlaneSettings
from geomx_cli.ps.link import Link
from geomx_cli.ps.loop import Loop
from geomx_cli.ps.membership import Membership
from geomx_cli.ps.partition import NEAR
from geomx_cli.ps.shaping import Shaper
from geomx_cli.ps.talk import Request, Talk
from geomx_cli.ps.transport import Transport
from geomx_cli.ps.wire import Header, Kind, decode_body, job_number

__all__ = ["Node"]

Body = dict[str, Any]
_Given = ParamSpec("_Given")

LAST_WORDS = 1.0
"""Seconds that a node that fails waits for its schedulers to know why; agents give all that fail two."""


class Node:
    """Everything that scheduler, server and client have in common. Used by the loop's thread only.

    `on_tensor` gets PUSH, PULL, EXCHANGE and RESULT messages; `on_request` gets control requests; `on_link` is told of
    peers that dial; `on_reconnect` of links on which tensors that were under way may be lost.
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
        self.talk = Talk(self.loop, self.timeout)
        self.telemetry: Body = {"state": "starting", "round": 0}
        self.memberships: list[Membership] = []
        self.error: GeomxError | None = None
        self._on_tensor = on_tensor
        self._on_request = on_request
        self._on_reconnect = on_reconnect
        if settings.interface and not settings.node_host:
            addresses.of_interface(settings.interface)  # also where it is not needed: it is wrong in all roles
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
            on_message=self._failing(self._on_message),
            on_link=self._failing(on_link),
            on_reconnect=self._repeat,
            events=events,
            slice_bytes=4 * int(settings.number("slice_elements") or NEAR),
            window_bytes=int(settings.number("window")),
            shaper=Shaper(settings.text("wan"), settings.wan_share),
        )

    def listen(self, fallback: PlaneSettings | None) -> tuple[str, ...]:
        """Bind the planned endpoints, or one on the own address of a process started by hand; returns what others dial.

        Raises InvalidSettings when the address is not loopback and there are no keys, or when there is no address.
        """
        planned = self.settings.bind
        endpoints = planned or (addresses.tcp(self.own_address(fallback), self.settings.port or "*"),)
        self.guard(endpoints)
        bound = self.transport.listen(endpoints)
        return (self.settings.advertise or bound) if planned else bound

    def guard(self, endpoints: tuple[str, ...]) -> None:
        """Refuse to listen beyond this machine without keys."""
        for endpoint in endpoints:
            if self.keys is None and not self.settings.insecure and not addresses.is_private(endpoint):
                raise InvalidSettings(
                    f"refusing to listen on {endpoint} without keys",
                    "start the job with geomx launch, which makes keys, or set GEOMX_INSECURE=1 in a network you trust",
                )

    def own_address(self, plane: PlaneSettings | None) -> str:
        """DMLC_NODE_HOST, the address of DMLC_INTERFACE, or the one that faces the scheduler; else InvalidSettings."""
        if self.settings.node_host:
            return addresses.own(self.settings.node_host)[0]
        if self.settings.interface:
            return addresses.of_interface(self.settings.interface)
        return addresses.facing(plane.uri, plane.port) if plane is not None else "127.0.0.1"

    def join(
        self, plane: PlaneSettings, role: str, on_roster: Callable[[Membership], None], **facts: Any
    ) -> Membership:
        """Register with a plane's scheduler; `on_roster` is called when all members have."""
        membership = Membership(self, plane, role, facts, on_roster)
        self.memberships.append(membership)
        return membership

    def farewell(self, servers: Iterable[Link] = ()) -> None:
        """All is well and this process is done: tell `servers` and every scheduler, and end `run` when they know.

        One that does not answer in the time of silence has ended, and its answer was lost: it is waited for no longer.
        """
        for membership in self.memberships:
            membership.over = True
        links = [*servers, *(membership.link for membership in self.memberships)]
        self._end("bye", {}, links, self.settings.number("silence"))

    def fail(self, error: GeomxError, members: Iterable[Link] = ()) -> None:
        """Remember why this process fails, tell every scheduler, or a scheduler its `members`, and end `run`."""
        if self.error is not None:
            return
        self.error = error
        origin = error.peer if isinstance(error, PeerLost) and error.peer else self.process
        body = {"process": origin, "message": error.message, "hint": error.hint}
        links = [*members, *(membership.link for membership in self.memberships if not membership.over)]
        self._end("fail", body, links, LAST_WORDS)

    def run(self, members: Callable[[], Iterable[Link]] = tuple) -> None:
        """Run the loop until stopped. Raises what made the node fail.

        A KeyboardInterrupt is raised again once the schedulers, or a scheduler's `members`, have been told.
        """
        self.loop.every(self.settings.number("heartbeat"), self._tick)
        try:
            self.loop.run()
        except KeyboardInterrupt as told:
            self.fail(Interrupted(f"{self.process} was ended by {told}"), members())
            self.loop.run()
            raise
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Say the last words, close the sockets, and write down what it came to."""
        self.transport.close()
        self.loop.close()
        self._report()

    def _tick(self) -> None:
        self._report()
        told = {name: value for name, value in self.telemetry.items() if name != "bytes"}  # nobody reads them there
        for membership in self.memberships:
            membership.beat(told)

    def _report(self) -> None:
        counters = self.transport.counters
        refused = {name: count for name, count in counters.items() if " from " not in name}
        self.telemetry["bytes"] = self.transport.traffic()
        if refused:
            self.telemetry["refused"] = refused
        self.events.write("telemetry", **self.telemetry)

    def _end(self, topic: str, body: Body, links: Iterable[Link], limit: float) -> None:
        """End `run` when all `links` have answered the last thing that is said to them, or after `limit` seconds."""
        waiting = set(links)

        def heard(link: Link, _: Body | GeomxError) -> None:
            waiting.discard(link)
            if not waiting:
                self.loop.stop()

        if not waiting:
            self.loop.stop()
        for link in list(waiting):
            self.talk.ask(link, topic, body, partial(heard, link), partial(heard, link), limit)

    def _failing(self, handle: Callable[_Given, None]) -> Callable[_Given, None]:
        """`handle`, whose errors make the node fail, in order: everybody hears why."""

        def handled(*given: _Given.args, **named: _Given.kwargs) -> None:
            try:
                handle(*given, **named)
            except GeomxError as error:
                self.fail(error)

        return handled

    def _repeat(self, link: Link) -> None:
        self.talk.repeat(link)
        self._on_reconnect(link)

    def _on_message(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if header.kind != Kind.CONTROL:
            self._on_tensor(link, header, payload)
            return
        body = decode_body(payload) if payload is not None else {}
        if header.topic == "answer":
            self.talk.answered(link, header.request, body)
            return
        request = self.talk.receive(link, header.request, header.topic, body)
        if request is None:
            return
        for membership in self.memberships:
            if membership.link is link:
                membership.on_request(request)
                return
        self._on_request(request)
