"""A process of the parameter server: its loop, transport, memberships of one or two planes, and requests.

A node that fails reports the reason to its schedulers, which report it to all. A node that receives a report of a
failure, or loses a peer, raises PeerLost in `run`. Every wait has a limit.
"""

import os
import socket
from collections.abc import Callable, Iterable
from typing import Any, Literal, ParamSpec

from geomx_cli.contract import addresses, security
from geomx_cli.contract.config import NodeSettings, PlaneSettings
from geomx_cli.core.errors import GeomxError, Interrupted, InvalidSettings, PeerLost
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Telemetry
from geomx_cli.ps.cluster.bodies import MAX_TEXT
from geomx_cli.ps.cluster.liveness import Liveness
from geomx_cli.ps.cluster.membership import Membership, Shutdown
from geomx_cli.ps.cluster.partition import LONGEST, NEAR
from geomx_cli.ps.cluster.rpc import Request, Rpc
from geomx_cli.ps.net.lanes import Lane
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.shaping import Shaper
from geomx_cli.ps.net.transport import Transport
from geomx_cli.ps.net.wire import MAX_INCARNATION, BadMessage, Header, Kind, decode_body, job_number

__all__ = ["Node"]

_Given = ParamSpec("_Given")

MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""Errors that the reading of a malformed body raises."""
UNLIMITED = 1e9
"""Seconds."""
LAST_WORDS, INTERRUPTED = 5.0, 1.0
"""Seconds that a failing node waits until its schedulers know the reason, because their connections may be cut just
then. An interrupted node waits less, because its schedulers are probably interrupted too. Agents give all failing nodes
two.
"""


class Node:
    """The common part of scheduler, server and client. Used by the loop's thread only.

    on_tensor: receives PUSH, PULL, EXCHANGE and RESULT messages.
    on_request: receives control requests.
    on_link: called for peers that dial.
    on_reconnect: called for lanes on which messages in flight may be lost.
    on_renewed: called for a peer that was restarted. Answers to its earlier requests are discarded.
    on_gone: called for a peer that needs nothing more.
    on_lost: receives a peer that is considered dead, and the reason. Returns the error by which the node fails, or None
        if the peer is not missed.
    on_asked: see Transport.
    members: a scheduler's members, which learn of its failure.
    active: see Liveness.
    listens: the bound endpoints.
    joining: seconds that others may take to join; no limit under an agent.
    absence: seconds for which links between parties may be silent, if a party may be left out; otherwise 0.
    patience: seconds that a round or barrier may take without progress. A script may request more than the option
        allows.
    encoded: bytes before and after encoding, by plane.
    """

    def __init__(
        self,
        settings: NodeSettings,
        events: EventLog,
        *,
        on_tensor: Callable[[Link, Header, memoryview | None], None],
        on_request: Callable[[Request], None],
        on_link: Callable[[Link], None] = lambda _: None,
        on_renewed: Callable[[Link], None] = lambda _: None,
        on_reconnect: Callable[[Link, Lane], None] = lambda _, __: None,
        on_gone: Callable[[Link], None] = lambda _: None,
        on_lost: Callable[[Link, PeerLost], PeerLost | None] = lambda _, error: error,
        on_asked: Callable[[Link, Header], None] = lambda _, __: None,
        members: Callable[[], Iterable[Link]] = tuple,
        active: Callable[[], float] = lambda: 0.0,
    ) -> None:
        if not 0 <= settings.incarnation <= MAX_INCARNATION:
            raise InvalidSettings(f"GEOMX_INCARNATION={settings.incarnation}", f"it is from 0 to {MAX_INCARNATION}")
        self.settings = settings
        self.events = events
        self.loop = Loop()
        self.timeout = settings.number("timeout")
        self.patience = settings.number("patience")
        self.absence = settings.number("absence") if settings.text("party_loss") == "out" else 0.0
        # An agent reports a process that ends before it has joined. Until it has joined, its script may take any time.
        self.joining = UNLIMITED if settings.supervised else self.timeout
        self.rpc = Rpc(self.loop, self.timeout, settings.incarnation)
        self.telemetry = Telemetry(state="starting")
        self.encoded: dict[Literal["lan", "wan"], tuple[int, int]] = {}
        self.memberships: list[Membership] = []
        self.listens: tuple[str, ...] = ()
        self.error: GeomxError | None = None
        self._on_tensor = on_tensor
        self._on_request = on_request
        self._on_renewed, self._on_reconnect, self._on_gone = on_renewed, on_reconnect, on_gone
        if settings.interface and not settings.node_host:
            # checked even if unused: a wrong interface is an error in every role
            addresses.of_interface(settings.interface)
        self._on_lost = on_lost
        self._members = members
        self.process = settings.process or f"{settings.role}@{socket.gethostname()}:{os.getpid()}"
        self.keys = security.load(settings.key_file)
        self.liveness = Liveness(
            self.loop, self.process, events,
            silence=settings.number("silence"), interval=settings.number("heartbeat"), on_lost=self._lose,
            active=active, supervised=settings.supervised,
        )  # fmt: skip
        self.transport = Transport(
            self.loop,
            job=job_number(settings.job),
            who={
                "process": self.process,
                "party": settings.party,
                "role": settings.role,
                "host": settings.host,
                "incarnation": settings.incarnation,
            },
            keys=self.keys,
            on_message=self._failing(self._on_message),
            on_link=self._failing(on_link),
            on_reconnect=self._repeat,
            on_renewed=self._failing(self._renew),
            on_closed=self.liveness.closed,
            on_asked=on_asked,
            events=events,
            slice_bytes=4 * int(settings.number("slice_elements") or NEAR),
            longest_slice=4 * int(settings.number("slice_elements") or LONGEST),
            window_bytes=int(settings.number("window")),
            shaper=Shaper(settings.text("wan"), settings.wan_share, settings.links, settings.party),
        )
        self.shutdown = Shutdown(self.loop, self.rpc, self.liveness, settings.number("silence"), self._part)

    def listen(self, fallback: PlaneSettings | None) -> tuple[str, ...]:
        """Bind the planned endpoints. A process started by hand binds one endpoint at its own address. Returns the
        endpoints that peers dial.

        Raises InvalidSettings if the address is not loopback and there are no keys, or if there is no address.
        """
        planned = self.settings.bind
        endpoints = planned or (addresses.tcp(self.own_address(fallback), self.settings.port or "*"),)
        self.guard(endpoints)
        self.listens = bound = self.transport.listen(endpoints)
        return (self.settings.advertise or bound) if planned else bound

    def guard(self, endpoints: tuple[str, ...]) -> None:
        """Raise InvalidSettings for endpoints that other machines can reach, if there are no keys."""
        for endpoint in endpoints:
            if self.keys is None and not self.settings.insecure and not addresses.is_private(endpoint):
                raise InvalidSettings(
                    f"refusing to listen on {endpoint} without keys",
                    "start the job with geomx launch, which makes keys, or set GEOMX_INSECURE=1 in a network you trust",
                )

    def check_identity(self, link: Link, role: str, roster: Membership | None) -> None:
        """Raise BadMessage if a dialling peer's hello claims, in this role ("worker" or "party"), a rank that differs
        from its key's rank. Without keys, compare with the roster, as soon as it has arrived.
        """
        rank = link.hello.get("rank")
        if self.keys is not None:
            matches = self.keys.identity(link.name) == (link.name, role, rank)
        else:
            unknown = roster is None or not roster.members
            matches = unknown or (isinstance(rank, int) and roster is not None and roster.has(link.name, role, rank))
        if not matches:
            raise BadMessage(f"{link.name} claims to be {role} {rank}, but is not")

    def own_address(self, plane: PlaneSettings | None) -> str:
        """DMLC_NODE_HOST, the address of DMLC_INTERFACE, or the one facing the scheduler. Raises InvalidSettings."""
        if self.settings.node_host:
            return addresses.own(self.settings.node_host)[0]
        if self.settings.interface:
            return addresses.of_interface(self.settings.interface)
        return addresses.facing(plane.uri, plane.port) if plane is not None else "127.0.0.1"

    def join(
        self, plane: PlaneSettings, role: str, on_roster: Callable[[Membership], None], **facts: Any
    ) -> Membership:
        """Register with a plane's scheduler. `on_roster` is called when all members have registered."""
        membership = Membership(self, plane, role, facts, on_roster)
        self.memberships.append(membership)
        return membership

    def goodbye(self, servers: Iterable[Link] = ()) -> None:
        """This process is done: tell `servers` and every scheduler. `run` ends when they have answered, and all peers
        that said goodbye to this process are gone.
        """
        if self.error is not None:  # failing: the last message is already sent
            return
        self.telemetry.state = "finished"
        self.shutdown.bye([*servers, *(membership.link for membership in self.memberships)])

    def fail(self, error: GeomxError) -> None:
        """Record why this process fails, tell every scheduler (a scheduler: its members), and end `run`."""
        if self.error is not None:
            return
        self.error = error
        blame = error.blame if isinstance(error, PeerLost) else PeerLost("").blame
        origin, observer = blame["peer"] or self.process, blame["observer"] or self.process
        body = {
            "process": origin, "message": error.message[:MAX_TEXT], "hint": error.hint[:MAX_TEXT],
            "observer": observer, "missed": blame["missed"], "seconds": blame["seconds"],
        }  # fmt: skip
        links = [*self._members(), *(membership.link for membership in self.memberships if not membership.over)]
        limit = INTERRUPTED if isinstance(error, Interrupted) else LAST_WORDS
        self.shutdown.fail(body, [link for link in links if link.name != origin], limit)

    def run(self) -> None:
        """Run the loop until stopped. Raises the error that made the node fail.

        A KeyboardInterrupt is raised again after the schedulers know of it (in a scheduler: its members).
        """
        self.loop.every(self.settings.number("heartbeat"), self._report)
        self.liveness.start()
        try:
            self.loop.run()
        except KeyboardInterrupt as told:
            self.fail(Interrupted(f"{self.process} was ended by {told}"))
            self.loop.run()
            raise
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Send pending messages, close the sockets, and log the final state."""
        self.transport.close()
        self.loop.close()
        self._report()

    def _report(self) -> None:
        counters = self.transport.counters
        refused = {name: count for name, count in counters.items() if " from " not in name}
        self.telemetry.bytes = self.transport.traffic()
        self.telemetry.bytes.encoded = self.encoded.get("wan", (0, 0))
        self.telemetry.bytes.encoded_lan = self.encoded.get("lan", (0, 0))
        if refused:
            self.telemetry.refused = refused
        self.events.write(self.telemetry)

    def _lose(self, link: Link, error: PeerLost) -> None:
        """This peer is considered dead: the job ends, unless either end has said goodbye."""
        if not self.shutdown.lost(link, error):
            for membership in self.memberships:
                membership.over = membership.over or membership.link is link
            if (failure := self._on_lost(link, error)) is not None:
                self.fail(failure)

    def _failing(self, handle: Callable[_Given, None]) -> Callable[_Given, None]:
        """Wrap `handle` so that its errors make the node fail in the orderly way, which reports them to all."""

        def handled(*given: _Given.args, **named: _Given.kwargs) -> None:
            try:
                handle(*given, **named)
            except GeomxError as error:
                self.fail(error)

        return handled

    def _part(self, link: Link) -> None:
        link.stop_sharing()
        self._on_gone(link)

    def _renew(self, link: Link) -> None:
        """This peer has been restarted."""
        self.rpc.renew(link)
        self.liveness.renewed(link)
        for membership in self.memberships:
            if membership.link is link:
                membership.renew()
        self._on_renewed(link)

    def _repeat(self, link: Link, lane: Lane) -> None:
        if lane == "control":
            self.rpc.repeat(link)
        self._on_reconnect(link, lane)

    def _on_message(self, link: Link, header: Header, payload: memoryview | None) -> None:
        if header.kind != Kind.CONTROL:
            self._on_tensor(link, header, payload)
            return
        body = decode_body(payload) if payload is not None else {}
        if header.topic == "answer":
            try:
                self.rpc.answered(link, header.request, body)
            except MALFORMED as error:
                what = f"{link.name} gave a malformed answer: {error!r}"
                self.fail(PeerLost(what, "do all processes have the same version of geomx?", peer=link.name))
            return
        request = self.rpc.receive(link, header.request, header.acked, header.topic, body)
        if request is None:
            return
        if request.topic == "gone":
            self.shutdown.gone(link)
            request.answer()
            return
        for membership in self.memberships:
            if membership.link is link:
                membership.on_request(request)
                return
        self._on_request(request)
