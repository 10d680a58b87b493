"""The links to the peers that dial this process. A hello tells to which link a connection belongs."""

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from geomx_cli.ps.net.connections import Connection
from geomx_cli.ps.net.lanes import IDENTITY, LANES, Lane
from geomx_cli.ps.net.link import Link, LinkTransport
from geomx_cli.ps.net.sockets import Socket
from geomx_cli.ps.net.wire import (
    MAX_HELLO,
    MAX_INCARNATION,
    BadMessage,
    Header,
    Kind,
    decode_body,
)

__all__ = ["AcceptedLinks", "MAX_LINKS"]

MAX_LINKS, MAX_OF_ONE = 4096, 256
"""Limits on the links that are made at all, and on the links to processes of one name, in all lives. Each link stays,
because it has counted bytes. A process that is restarted keeps its link."""
MAX_ENDED = 4 * MAX_LINKS
"""Number of remembered identities. A message of an older identity is refused like a message before the hello."""


class _Peer(NamedTuple):
    """The process to which a link leads.

    process: its name, which its key proves.
    plane, rank: the plane in which it dials, and its rank there; "" and None if hellos do not name them, as to a
        scheduler.
    """

    process: str
    plane: str
    rank: int | None


class _Hello(NamedTuple):
    """The content of a hello.

    incarnation: how often an agent has started the process again.
    life: differs between processes that are started under one name.
    body: the whole hello.
    """

    peer: _Peer
    party: str
    incarnation: int
    life: str
    lane: Lane
    body: dict[str, Any]


class AcceptedLinks:
    """Accepts connections by their hello. Used by the loop's thread only.

    A process that was restarted has a higher incarnation, and keeps its link. If a process was started twice by
    mistake, the second one has the same incarnation but another life, and gets a separate link. So it does not receive
    the first one's messages, and does not end its connections. Its requests arrive, and the code that counts members
    refuses it by name.

    party: this process's party.
    on_link: called for each new link, with whether it is over a unix socket. It may refuse the link with BadMessage.
    on_renewed: called for a link whose peer has been restarted, with the lane that shows it.
    on_closed: called when the connection of a link's control lane has ended.
    by_identity: link and lane of each connection, by its routing identity.
    ended: the identities of processes that have been restarted since; the newest MAX_ENDED of them, newest last.
    """

    def __init__(
        self,
        transport: LinkTransport,
        party: str,
        on_link: Callable[[Link, bool], None],
        on_renewed: Callable[[Link], None],
        on_closed: Callable[[Link], None],
    ) -> None:
        self._transport = transport
        self._party = party
        self._on_link = on_link
        self._on_renewed = on_renewed
        self._on_closed = on_closed
        self._made = Counter[str]()  # number of links, by process
        self._links: dict[_Peer, dict[str, Link]] = {}  # by life, all in the peer's newest incarnation
        self.by_identity: dict[bytes, tuple[Link, Lane]] = {}
        self.ended: dict[bytes, None] = {}
        self._by_descriptor: dict[int, tuple[Link, Lane]] = {}

    def accept(self, header: Header, payload: memoryview | None, router: Socket, sender: zmq.Frame) -> Link:
        """The link of a connection whose first message this is, its hello. Raises BadMessage."""
        identity = sender.bytes
        hello = _parse_hello(header, payload, _owner(sender))
        if len(identity) != IDENTITY:  # libzmq gives a replaced connection another one, of 5 bytes
            raise BadMessage("a hello on a connection that has been replaced")
        link = self._known(hello)
        if link is None and self._is_full(hello.peer):
            raise BadMessage("too many links")
        if link is None:
            link = Link(self._transport, hello.peer.process, hello.party != self._party)
            link.hello, link.incarnation = hello.body, hello.incarnation
            link.lanes.attach(hello.lane, router, identity)
            self._on_link(link, _is_near(sender))
            self._made[hello.peer.process] += 1
            self._links.setdefault(hello.peer, {})[hello.life] = link
            self.by_identity[identity] = link, hello.lane
            return link
        restarted = hello.incarnation != link.incarnation
        if restarted:
            self._renew(link, hello)
        self.by_identity.pop(link.lanes.attach(hello.lane, router, identity), None)
        self.by_identity[identity] = link, hello.lane
        if restarted:
            self._on_renewed(link)
        return link

    def _is_full(self, peer: _Peer) -> bool:
        """Whether no further link may be made, at all or to this peer."""
        return self._made.total() >= MAX_LINKS or self._made[peer.process] >= MAX_OF_ONE

    def _known(self, hello: _Hello) -> Link | None:
        """The link to which this hello belongs. Raises BadMessage for a hello of an earlier incarnation."""
        lives = self._links.get(hello.peer, {})
        newest = next((link.incarnation or 0 for link in lives.values()), hello.incarnation)
        if hello.incarnation < newest:
            raise BadMessage(f"a hello of {hello.peer.process} in incarnation {hello.incarnation}, which has ended")
        if hello.incarnation == newest:
            return lives.get(hello.life)
        return next(iter(lives.values()))  # the code that counts members has refused the others

    def _renew(self, link: Link, hello: _Hello) -> None:
        """The process has been restarted: forget its connections."""
        lives = self._links[hello.peer].values()
        old = {identity for identity, (other, _) in self.by_identity.items() if other in lives}
        self.by_identity = {item: place for item, place in self.by_identity.items() if item not in old}
        self.ended |= dict.fromkeys(old)
        for identity in list(self.ended)[:-MAX_ENDED]:
            del self.ended[identity]
        self._links[hello.peer] = {hello.life: link}
        link.hello |= {"life": hello.life, "incarnation": hello.incarnation}
        link.renew(hello.incarnation, hello.lane)

    def note(self, link: Link, lane: Lane, descriptor: int) -> None:
        """Record the connection of a lane; it replaces an older one."""
        connection = link.lanes.connections.get(lane)
        if connection is None or connection.descriptor != descriptor:
            self._by_descriptor[descriptor] = link, lane
            link.lanes.connections[lane] = Connection(descriptor)

    def closed(self, descriptor: int) -> None:
        """An accepted connection has ended."""
        place = self._by_descriptor.pop(descriptor, None)
        if place is None:
            return
        link, lane = place
        connection = link.lanes.connections.get(lane)
        # An old connection may end after a new one has replaced it: then nothing has ended for the link.
        if connection is not None and connection.descriptor == descriptor:
            del link.lanes.connections[lane]
            if lane == "control":
                self._on_closed(link)


def _parse_hello(header: Header, payload: memoryview | None, owner: str | None) -> _Hello:
    """The content of a hello. Its sender must have the key of the process that it names."""
    if header.kind != Kind.CONTROL or header.topic != "hello" or payload is None:
        raise BadMessage("a message before the hello")
    hello = decode_body(payload, MAX_HELLO)
    try:
        name, party, life = (str(hello[field])[:128] for field in ("process", "party", "life"))
        incarnation = hello["incarnation"]
    except KeyError as error:
        raise BadMessage(f"a hello without {error}") from None
    if owner not in (None, name):
        raise BadMessage(f"a hello of {name} with the key of {owner}")
    if type(incarnation) is not int or not 0 <= incarnation <= MAX_INCARNATION:
        raise BadMessage(f"a hello of {name} in incarnation {incarnation!r}"[:200])
    lane = next((known for known in LANES if known == hello.get("lane")), None)
    if lane is None:
        raise BadMessage("a connection that is no lane of a link")
    rank = hello.get("rank")
    peer = _Peer(name, str(hello.get("plane", "")), rank if isinstance(rank, int) else None)
    return _Hello(peer, party, incarnation, life, lane, hello)


def _is_near(sender: zmq.Frame) -> bool:
    """Whether the message came over a unix socket: then libzmq gives the peer's account and pid instead of an address.
    """
    try:
        return str(sender.get("Peer-Address")).startswith("localhost:")
    except zmq.ZMQError:
        return False


def _owner(sender: zmq.Frame) -> str | None:
    """The process for which the sender's key was made; None without keys, as over a unix socket."""
    try:
        return str(sender.get("User-Id"))
    except zmq.ZMQError:
        return None
