"""The two connections of a link, and the observations of the peer that they give.

A new connection replaces an old one by a handshake. The dialling end says hello, and the listening end welcomes it.
Then the dialling end says that it is ready, and may send from then on.
"""

import math
import time
from collections import Counter
from typing import Any, Literal

import zmq

from geomx_cli.ps.net.connections import Connection
from geomx_cli.ps.net.sockets import Socket
from geomx_cli.ps.net.wire import BadMessage, Header, Place, decode_body, encode_body, encode_header

__all__ = ["IDENTITY", "LANES", "QUIET", "Lane", "Lanes", "LinkHealth"]

Lane = Literal["tensors", "control"]
LANES: tuple[Lane, Lane] = ("control", "tensors")
IDENTITY = 13
"""Bytes of a connection's routing identity. They are random, because anyone who knows them could take the connection
over."""
QUIET = 5.0
"""Seconds without a message after which a link counts as silent."""
MOST_SECONDS = 1e12
UNPROBED = 6.0
"""Seconds without a byte after which the peer's process does not run. Its libzmq asks or answers every 2 s."""
SLACK = 64
"""Bytes by which the counts of both ends may differ, because a kernel counts the handshake too."""
AGEING, SHORTEST = 1.01, 1e-5
"""The shortest round trip grows by this factor with each heartbeat, so that a longer route is noticed. The second
constant is its minimum, in seconds."""


class Lanes:
    """Writes to the connections of one link.

    job: see Header.
    incarnation: this process's incarnation.
    counters: counts writes to peers that cannot be reached, as "unreachable".
    greeting: the content of this process's hellos; None if the peer dials.
    connections: the connections that stand.
    stale: lanes that this process dials, and on which only the dead peer has welcomed it.
    """

    def __init__(
        self, job: int, counters: Counter[str], greeting: dict[str, Any] | None, incarnation: int = 0
    ) -> None:
        self._job = job
        self._incarnation = incarnation
        self._counters = counters
        self._greeting = greeting
        self._sockets: dict[Lane, tuple[Socket, bytes]] = {}
        self.connections: dict[Lane, Connection] = {}
        self.stale: set[Lane] = set()
        self._hellos = 0
        self._greeted: dict[Lane, int] = {}  # the number of the latest hello, whichever end dials
        self._connected: set[Lane] = set()
        self._up: set[Lane] = set()

    def attach(self, lane: Lane, socket: Socket, identity: bytes = b"") -> bytes:
        """Use `socket` for this lane. Returns the identity that was used before, or empty bytes if there was none.

        identity: the routing identity of the peer's connection on a ROUTER; empty on a DEALER.
        """
        _, before = self._sockets.get(lane, (socket, b""))
        self._sockets[lane] = (socket, identity)
        return before

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
        self._say("welcome", lane, number, self._incarnation)

    def ready(self, lane: Lane, number: int) -> None:
        """Answer a welcome. Messages on this lane are no longer dropped. The peer repeats its requests only now,
        because the answers could be lost before.
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

    def renew(self, lane: Lane) -> None:
        """The peer has been restarted, as this lane's connection shows. All other connections lead to the dead process.
        """
        self._connected.clear()
        self._up.clear()
        if self._greeting is not None:
            self.stale = {other for other in LANES if other != lane}
        else:
            self._sockets.clear()
            self._greeted.clear()
            self.connections.clear()

    def down(self, lane: Lane) -> None:
        """This lane's connection has ended."""
        self.connections.pop(lane, None)
        self._up.discard(lane)
        self._greeted.pop(lane, None)

    def is_up(self, lane: Lane) -> bool:
        """Whether both ends know this lane's connection."""
        return lane in self._up

    @property
    def all_up(self) -> bool:
        """Whether both lanes, dialled by this process, have been welcomed."""
        return len(self._up) == len(LANES)

    def _say(self, topic: str, lane: Lane, number: int, incarnation: int = 0) -> None:
        header = Header(job=self._job, topic=topic, request=number, acked=incarnation, place=Place.NONE)
        self._write(lane, [encode_header(header)])

    def _write(self, lane: Lane, parts: list[Any]) -> None:
        """Write to the socket. An unreachable peer is only counted; the heartbeat detects its silence."""
        socket, identity = self._sockets.get(lane) or next(iter(self._sockets.values()))
        try:
            socket.send_multipart([identity, *parts] if identity else parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._counters["unreachable"] += 1


class LinkHealth:
    """The observations from which liveness.py judges a peer. Times in time.monotonic seconds.

    heard: when the last message was received.
    echoed: the send time of the newest message that the peer is known to have received, or when its connection was
        made.
    round_trip: the shortest time, in seconds, that a heartbeat and its echo were on their way; inf before the first. It
        grows with age (AGEING).
    unsteady: when our heartbeats last went unanswered for a while.
    closed: when the peer closed the connection; 0 if it has not.
    clock: the newest reading of the peer's own clock.
    acknowledged, taken: bytes of the tensors' connection that were acknowledged to the peer, and that the peer has
        received.
    """

    def __init__(self) -> None:
        self.heard = time.monotonic()
        self.clock = self.echoed = self.closed = self.unsteady = 0.0
        self.round_trip = math.inf
        self.acknowledged = self.taken = 0
        self._clock_received = 0.0
        self._whole: tuple[object, int, int] = (None, 0, 0)
        self._stalled_since = 0.0
        self._silence: tuple[object, float] = (None, 0.0)
        self._probe = (0, 0.0)  # bytes received on the control lane, and when they last grew
        self._known = False
        self._moved = self._moved_behind = self._whole_since = 0.0

    def hear(self, *, moved: bool) -> None:
        """Record a received message. `moved`: whether it was a tensor or carried credit for one."""
        now = time.monotonic()
        if not self._known or now - self.heard >= QUIET:
            self._whole_since = now
        self._known, self.heard = True, now
        if moved:
            self._moved = now

    def receive_heartbeat(self, payload: memoryview | None) -> None:
        """Record a heartbeat's clock, echo and progress. Raises BadMessage."""
        body: dict[str, Any] = decode_body(payload) if payload is not None else {}
        clock, echo, moved = body.get("clock", float("inf")), body.get("echo", 0.0), body.get("moved", -1.0)
        delay = body.get("delay", -1.0)
        numbers = (clock, echo, moved, delay)
        if not all(isinstance(number, int | float) and abs(number) < MOST_SECONDS for number in numbers):
            raise BadMessage(f"a heartbeat that says {numbers!r}"[:200])
        now = time.monotonic()
        self.clock = float(clock)
        self.echoed = max(self.echoed, min(echo, now))
        self._clock_received = now
        if echo and delay >= 0:
            self.round_trip = min(AGEING * self.round_trip, max(SHORTEST, now - echo - delay))
        self.acknowledged, self.taken = _count(body, "acknowledged"), _count(body, "taken")
        if moved >= 0:
            self._moved_behind = max(self._moved_behind, now - moved)

    def runs(self, control: Connection | None) -> bool:
        """Whether the peer's process runs, though it sends nothing, as far as calls in this silence have observed. It
        runs if its libzmq has just sent something. A connection within one host stands as long as the process, which
        its agent watches.
        """
        if control is None:
            return False
        now, received = time.monotonic(), control.received()
        if self._silence != (control, self.heard):
            self._silence, self._probe = (control, self.heard), (received, 0.0)
        elif received != self._probe[0]:
            self._probe = (received, now)
        return not control.counts or now - self._probe[1] < UNPROBED

    def lost_bytes(self, tensors: Connection) -> float:
        """Seconds for which acknowledged bytes of this connection have not arrived at the receiving end, here or there.
        The end must not have received anything else either. Then a proxy has forgotten the connection. 0 if no bytes
        are missing.
        """
        now, here = time.monotonic(), tensors.received()
        there = self.taken
        missing = max(tensors.acknowledged() - there, self.acknowledged - here) > SLACK
        if not missing or not self.taken or self._whole != (tensors, here, there):
            self._whole, self._stalled_since = (tensors, here, there), now
        return now - self._stalled_since

    def echo_delay(self) -> float:
        """Seconds since the newest reading of the peer's clock, which the next heartbeat echoes, was received."""
        return time.monotonic() - self._clock_received

    def connected(self) -> None:
        """Record that the handshake of the connection that carries heartbeats has crossed in both directions."""
        self.echoed = max(self.echoed, time.monotonic())

    def expect(self) -> None:
        """Start measuring silence now."""
        self.heard = time.monotonic()

    def renew(self) -> None:
        """The peer has been restarted. Earlier observations of its connections and its clock are no longer valid."""
        self.excuse(math.inf)
        self.clock = self.closed = 0.0
        self.acknowledged = self.taken = 0

    def excuse(self, pause: float) -> None:
        """This process did not run for `pause` seconds. Do not count them as the peer's silence."""
        now = time.monotonic()
        self.heard = min(now, self.heard + pause)
        self._whole_since = now if self._known else 0.0
        self._stalled_since = now
        if self.closed:
            self.closed = min(now, self.closed + pause)

    def whole_since(self) -> float:
        """The start of the current period without silence: now, if the peer is silent; 0 if it was never heard."""
        now = time.monotonic()
        return now if self._known and now - self.heard >= QUIET else self._whole_since

    def progress(self) -> float:
        """The time of the last progress on this link or behind the peer: a tensor, credit for one, or a restored
        connection.

        While the link is silent, the present time is returned, because lost messages are retransmitted later.
        """
        return max(self._moved, self._moved_behind, self.whole_since())


def _count(body: dict[str, Any], name: str) -> int:
    """A number of bytes in a heartbeat; 0 if the heartbeat has none. Raises BadMessage."""
    count = body.get(name, 0)
    if type(count) is not int or not 0 <= count < MOST_SECONDS:
        raise BadMessage(f"a heartbeat that says {name} {count!r}"[:200])
    return count
