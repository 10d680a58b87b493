"""The links to the peers that dial this process, found by the identities of their connections."""

from collections.abc import Callable
from typing import Any

import zmq

from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.net.lanes import Lane, parse_identity
from geomx_cli.ps.net.link import Link, LinkTransport
from geomx_cli.ps.net.shared_memory import Arena
from geomx_cli.ps.net.sockets import Socket
from geomx_cli.ps.net.tcp import Connection
from geomx_cli.ps.net.wire import BadMessage, Header, Kind, decode_body

__all__ = ["AcceptedLinks", "MAX_HELLO", "Sharing"]

# Decides which links of a process use shared memory, and keeps track of offers and loans.


class Sharing:
    """The dialling end of a unix socket offers its memory; a peer that can map it is on the same host and offers its
    own.

    Used by the loop's thread only.
    """

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._arena: Arena | None = None
        self._has_no_arena = self._was_full = False
        self._allowed: set[Link] = set()
        self._offered: set[Link] = set()
        self._gone: set[Link] = set()

    def allow(self, link: Link) -> None:
        """Mark a link over a unix socket that is not an emulated wide-area link."""
        self._allowed.add(link)

    def offer(self, link: Link) -> None:
        """Offer this process's memory once, if the link allows it."""
        if link not in self._allowed or link in self._offered:
            return
        if self._arena is None and not self._has_no_arena:
            try:
                self._arena = Arena()
            except OSError:
                self._has_no_arena = True
        if self._arena is not None:
            self._offered.add(link)
            link.control("memory", self._arena.offer())

    def receive(self, link: Link, topic: str, body: dict[str, Any]) -> None:
        """Handle "memory" (an offer), "mapped" (ours was accepted) or "freed" (blocks). Raises BadMessage."""
        if link not in self._allowed:
            raise BadMessage("an offer of memory from another host")
        if topic == "memory":
            if link.map(body):
                link.control("mapped")
                self.offer(link)
        elif topic == "mapped":
            if link in self._offered:
                link.enable_shared_memory(self.lend)
        elif self._arena is not None and link not in self._gone:
            self._arena.freed(link, body.get("blocks"))

    def lend(self, link: Link, payload: memoryview, *, lasting: bool) -> bytes | None:
        """The place of a copy of the payload in shared memory; None if there is no room. See Arena.put."""
        assert self._arena is not None
        if link in self._gone:
            return None
        place = self._arena.put(link, payload, lasting=lasting)
        if place is None and not self._was_full:
            self._was_full = True
            message = "shared memory with processes of this host is full; falling back to sockets"
            self._events.write(WarningRaised(message=message))
        return place

    def forget(self, link: Link) -> None:
        """Release everything lent to a peer that has left or is lost. It may still be freeing blocks, which others may
        have by then: that has no effect, and it is lent nothing more.
        """
        self._gone.add(link)
        if self._arena is not None:
            self._arena.forget(link)


MAX_LINKS = 4096
MAX_HELLO = 4096


class AcceptedLinks:
    """Accepts connections by their hello. Used by the loop's thread only.

    party: of this process. on_link: called for each new link, with whether it is over a unix socket; may refuse it with
    BadMessage. on_closed: called when the connection of a link's control lane has ended. `by_identity`: the links by
    the routing identities of their connections.
    """

    def __init__(
        self,
        transport: LinkTransport,
        party: str,
        on_link: Callable[[Link, bool], None],
        on_closed: Callable[[Link], None],
    ) -> None:
        self._transport = transport
        self._party = party
        self._on_link = on_link
        self._on_closed = on_closed
        self.by_identity: dict[bytes, Link] = {}
        self._by_peer: dict[bytes, Link] = {}
        self._by_descriptor: dict[int, tuple[Link, Lane]] = {}
        self._descriptors: dict[tuple[Link, Lane], int] = {}

    def accept(self, header: Header, payload: memoryview | None, router: Socket, sender: zmq.Frame) -> Link:
        """The link of a connection whose first message this is: its hello. Raises BadMessage."""
        name, party, hello = _parse_hello(header, payload, _owner(sender))
        identity = sender.bytes
        peer, lane = parse_identity(identity)
        if len(self.by_identity) >= 2 * MAX_LINKS:
            raise BadMessage("too many links")
        link = self._by_peer.get(peer)
        if link is None:
            link = Link(self._transport, name, party != self._party)
            link.hello = hello
        link.lanes.attach(lane, router, identity)
        if peer not in self._by_peer:
            self._on_link(link, _is_near(sender))
            self._by_peer[peer] = link
        self.by_identity[identity] = link
        return link

    def note(self, link: Link, lane: Lane, descriptor: int) -> None:
        """Record the connection of a lane; it replaces an older one."""
        before, key = self._descriptors.get((link, lane)), (link, lane)
        if before != descriptor:
            if before is not None and self._by_descriptor.get(before) == key:  # else the system has reused it
                del self._by_descriptor[before]
            self._by_descriptor[descriptor], self._descriptors[key] = key, descriptor
            link.lanes.connections[lane] = Connection(descriptor)

    def closed(self, descriptor: int) -> None:
        """An accepted connection has ended."""
        key = self._by_descriptor.pop(descriptor, None)
        if key is not None:
            link, lane = key
            del self._descriptors[key]
            link.lanes.connections.pop(lane, None)
            if lane == "control":
                self._on_closed(link)


def _parse_hello(header: Header, payload: memoryview | None, owner: str | None) -> tuple[str, str, dict[str, Any]]:
    """Process, party and body of a hello, whose sender must have the key of the process that it names."""
    if header.kind != Kind.CONTROL or header.topic != "hello" or payload is None:
        raise BadMessage("a message before the hello")
    hello = decode_body(payload, MAX_HELLO)
    try:
        name, party = str(hello["process"])[:128], str(hello["party"])[:128]
    except KeyError as error:
        raise BadMessage(f"a hello without {error}") from None
    if owner not in (None, name):
        raise BadMessage(f"a hello of {name} with the key of {owner}")
    return name, party, hello


def _is_near(sender: zmq.Frame) -> bool:
    """Whether the message came over a unix socket: then libzmq gives the peer's account and pid instead of an address.
    """
    try:
        return str(sender.get("Peer-Address")).startswith("localhost:")
    except zmq.ZMQError:
        return False


def _owner(sender: zmq.Frame) -> str | None:
    """The process that the sender's key was made for; None without keys, as over a unix socket."""
    try:
        return str(sender.get("User-Id"))
    except zmq.ZMQError:
        return None
