"""The two connections of a link, and the handshake by which a new connection replaces an old one: the dialling end says
hello, the listening end welcomes it, and the dialling end, which may send from then on, says that it is ready.
"""

import secrets
from collections import Counter
from typing import Any, Literal

import zmq

from geomx_cli.ps.net.sockets import Socket
from geomx_cli.ps.net.tcp import Connection
from geomx_cli.ps.net.wire import BadMessage, Header, Place, encode_body, encode_header

__all__ = ["LANES", "Lane", "Lanes", "identities", "parse_identity"]

Lane = Literal["tensors", "control"]
LANES: tuple[Lane, Lane] = ("control", "tensors")
IDENTITY = 12  # bytes, without the one for the lane; a replaced connection gets another identity, of 5 bytes


class Lanes:
    """Writes to the connections of one link.

    job: see Header. counters: counts "unreachable" peers. greeting: what this process says of itself in its hellos;
    None if the peer dials. connections: those that stand.
    """

    def __init__(self, job: int, counters: Counter[str], greeting: dict[str, Any] | None) -> None:
        self._job = job
        self._counters = counters
        self._greeting = greeting
        self._sockets: dict[Lane, tuple[Socket, bytes]] = {}
        self.connections: dict[Lane, Connection] = {}
        self._hellos = 0
        self._greeted: dict[Lane, int] = {}  # the number of the latest hello, from whichever end dials
        self._connected: set[Lane] = set()
        self._up: set[Lane] = set()

    def attach(self, lane: Lane, socket: Socket, identity: bytes) -> None:
        """Use `socket` for this lane; `identity` is the peer's on a ROUTER, else empty."""
        self._sockets[lane] = (socket, identity)

    def write(self, lane: Lane, parts: list[Any]) -> None:
        """Write to the socket. On a dialled lane the parts are dropped until the peer has welcomed it."""
        if self._greeting is None or lane in self._up:
            self._write(lane, parts)

    def greet(self, lane: Lane) -> None:
        """Say hello on a new connection of a lane that this process dials. Nothing else is sent on it before the peer's
        welcome.

        Otherwise a message on the other lane could arrive before the hello, and its answer would be sent on the old
        connection and lost.
        """
        self._hellos += 1
        self._greeted[lane] = self._hellos
        header = Header(job=self._job, topic="hello", request=self._hellos, place=Place.FRAME)
        self._write(lane, [encode_header(header), encode_body({**(self._greeting or {}), "lane": lane})])

    def welcome(self, lane: Lane, number: int) -> None:
        """Answer a hello: messages on this lane use its new connection from now on."""
        self._greeted[lane] = number
        self._say("welcome", lane, number)

    def ready(self, lane: Lane, number: int) -> None:
        """Answer a welcome: messages on this lane are no longer dropped. The peer repeats its requests only now, since
        the answers could be lost before.
        """
        self._say("ready", lane, number)

    def lane_of(self, number: int) -> Lane | None:
        """The lane whose latest hello had this number, if the handshake has not ended."""
        return next((lane for lane, latest in self._greeted.items() if latest == number), None)

    def up(self, lane: Lane) -> bool:
        """Both ends know the new connection of this lane. Returns True if the lane had a connection before."""
        again = lane in self._connected
        self._connected.add(lane)
        self._up.add(lane)
        self._greeted.pop(lane, None)
        return again

    def down(self, lane: Lane) -> None:
        """This lane's connection has ended."""
        self.connections.pop(lane, None)
        self._up.discard(lane)
        self._greeted.pop(lane, None)

    @property
    def all_up(self) -> bool:
        """Whether both lanes, dialled by this process, have been welcomed."""
        return len(self._up) == len(LANES)

    def _say(self, topic: str, lane: Lane, number: int) -> None:
        self._write(lane, [encode_header(Header(job=self._job, topic=topic, request=number, place=Place.NONE))])

    def _write(self, lane: Lane, parts: list[Any]) -> None:
        """Write to the socket. An unreachable peer is only counted; the heartbeat detects its silence."""
        socket, identity = self._sockets.get(lane) or next(iter(self._sockets.values()))
        try:
            socket.send_multipart([identity, *parts] if identity else parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._counters["unreachable"] += 1


def identities() -> dict[Lane, bytes]:
    """New routing identities for the connections of one link: random bytes that they share, and the lane's number."""
    peer = secrets.token_bytes(IDENTITY).replace(b"\0", b"\1")
    return {lane: peer + bytes([number]) for number, lane in enumerate(LANES, 1)}


def parse_identity(identity: bytes) -> tuple[bytes, Lane]:
    """The bytes that both lanes of a link share, and the lane. Raises BadMessage."""
    if len(identity) != IDENTITY + 1:
        raise BadMessage("a hello on a connection that has been replaced")
    if not 1 <= identity[-1] <= len(LANES):
        raise BadMessage("a connection that is no lane of a link")
    return identity[:-1], LANES[identity[-1] - 1]
