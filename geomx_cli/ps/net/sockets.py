"""The sockets of one process: creation, security, and detection of dead connections.

A listening process has one ROUTER. A dialling process has a DEALER for each lane of a link (see lanes.py). No socket
has a high-water mark, and sends never block. Data handed to a connection may be lost with it, on either side.

A dead TCP connection is closed and dialled again. The kernel probes an idle connection, and gives it up after DEAD
seconds. On a busy connection, the dialling end checks for acknowledgements. This does not involve the remote process,
which may be stopped: its kernel answers. Any acknowledgement counts, so a slow connection is not mistaken for a dead
one.
"""

import contextlib
import resource
import struct
import time
from collections.abc import Callable
from functools import partial

import zmq

from geomx_cli.contract.security import KeyRing
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.net.connections import MAX_SECONDS, Connection, UnknownPeers, ZapAuthenticator
from geomx_cli.ps.net.loop import Loop

__all__ = ["DEAF", "Socket", "Sockets", "UNANSWERED"]

Socket = zmq.Socket[bytes]

MAX_SOCKETS = 65_000
LOCAL_BUFFER = 2 * 2**20
RECONNECT_FIRST, RECONNECT_MOST = 50, 1000  # milliseconds
DEAD = 4  # seconds
UNANSWERED = 3.5
"""Seconds after which a connection is given up if data waits for acknowledgements and none arrive."""
LOOK = 0.5  # seconds between checks for acknowledgements
PROBE = 1  # seconds between probes of an idle connection
PING, DEAF = 2.0, 12.0
"""Seconds between questions to the peer's libzmq. Seconds without a byte from it after which the peer is dialled again.
"""
NEVER = 10**9  # milliseconds
CONNECT_LIMIT = 8  # seconds; enough for the kernel to repeat a lost SYN, and for slow paths


class Sockets:
    """Creates sockets, with keys on TCP if there are any, watches them and closes them all.

    on_refused: called with a reason and a text for each refused connection.
    max_message: the most bytes of a message part from others. A longer part ends its connection.

    Used by the loop's thread only.
    """

    def __init__(
        self, loop: Loop, keys: KeyRing | None, on_refused: Callable[[str, str], None], max_message: int
    ) -> None:
        self._loop = loop
        self._keys = keys
        self._on_refused = on_refused
        self._max_message = max_message
        self._unknown = UnknownPeers(loop, partial(on_refused, "handshake"))
        _raise_descriptor_limit()
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._made: list[Socket] = []
        self._authenticator: ZapAuthenticator | None = None
        self._report_accepted: Callable[[], None] = lambda: None
        self._dialled: dict[Socket, Connection] = {}
        self._probed: set[Socket] = set()
        self._polled = time.monotonic()
        loop.every(LOOK, self._poll)

    def listen(
        self, endpoints: tuple[str, ...], read: Callable[[Socket], None], on_closed: Callable[[int], None]
    ) -> tuple[str, ...]:
        """Bind one ROUTER to all `endpoints`; returns the bound endpoints.

        Raises InvalidSettings that names the endpoint if one cannot be bound.

        read: called with the socket when it has messages.
        on_closed: receives the file descriptor of each ended connection, as its frames have it (SRCFD).
        """
        router = self._make(zmq.ROUTER, read)
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.ROUTER_HANDOVER, 1)
        router.set(zmq.HANDSHAKE_IVL, int(1000 * MAX_SECONDS))
        self._watch_accepted(router, on_closed)
        bound = []
        for endpoint in endpoints:
            self._secure_listener(router, endpoint)
            _widen(router, endpoint)
            try:
                router.bind(endpoint)
            except zmq.ZMQError as error:
                raise InvalidSettings(
                    f"cannot listen on {endpoint}: {error.strerror.lower()}",
                    "another process holds the port, or this machine lacks the address; choose another",
                ) from None
            bound.append(bytes(router.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode())
        return tuple(bound)

    def dial(
        self,
        endpoint: str,
        identity: bytes,
        read: Callable[[Socket], None],
        on_connected: Callable[[Connection], None],
        on_closed: Callable[[bool], None],
        *,
        probed: bool,
    ) -> Socket:
        """A DEALER that connects to `endpoint`, retrying forever, so the peer may start later.

        read: called with the socket when it has messages.
        on_connected: called for each new connection.
        on_closed: called when a connection has ended, with whether this end gave it up.
        probed: whether libzmq asks the peer's libzmq for an answer every PING seconds. Then the connection is given up
            once nothing has been received for DEAF seconds, whatever a proxy on the way acknowledges. Behind long
            messages, such silence tells nothing.
        """
        dealer = self._make(zmq.DEALER, read)
        if probed and endpoint.startswith("tcp:"):
            dealer.set(zmq.HEARTBEAT_IVL, int(1000 * PING))
            dealer.set(zmq.HEARTBEAT_TIMEOUT, NEVER)
            self._probed.add(dealer)
        # IMMEDIATE is not set: libzmq (4.3.5) would abort if a connection then ended between two frames that are read.
        # So messages that are sent before the end of a connection is noticed come first on the next connection.
        dealer.set(zmq.CONNECT_TIMEOUT, 1000 * CONNECT_LIMIT)
        dealer.set(zmq.ROUTING_ID, identity)
        if self._keys is not None and endpoint.startswith("tcp:"):
            dealer.set(zmq.CURVE_SERVERKEY, self._keys.server_public.encode())
            dealer.set(zmq.CURVE_PUBLICKEY, self._keys.public.encode())
            dealer.set(zmq.CURVE_SECRETKEY, self._keys.private.encode())
        _widen(dealer, endpoint)
        self._watch_connection(dealer, on_connected, on_closed)
        dealer.connect(endpoint)
        return dealer

    def awaits_hello(self, descriptor: int) -> bool:
        """Whether a hello on this accepted connection may be its first one."""
        # libzmq's thread may deliver the first message before this thread has read that the connection was accepted.
        self._report_accepted()
        return self._unknown.awaits_hello(descriptor)

    def identified(self, descriptor: int) -> None:
        """The peer on this accepted connection has sent a hello that was accepted."""
        self._unknown.identified(descriptor)

    def close(self, linger: float) -> None:
        """Close all sockets; pending data may be sent within `linger` seconds."""
        for made in self._made:
            self._loop.unwatch(made)
            made.close(int(linger * 1e3))
        if self._authenticator is not None:
            self._loop.unwatch(self._authenticator.socket)
            self._authenticator.socket.close(0)
        self._context.term()

    def _make(self, kind: int, read: Callable[[Socket], None]) -> Socket:
        made = self._context.socket(kind)
        made.set(zmq.SNDHWM, 0)
        made.set(zmq.RCVHWM, 0)
        made.set(zmq.LINGER, 1000)
        made.set(zmq.IPV6, 1)
        made.set(zmq.TCP_KEEPALIVE, 1)
        made.set(zmq.TCP_KEEPALIVE_IDLE, PROBE)
        made.set(zmq.TCP_KEEPALIVE_INTVL, PROBE)
        made.set(zmq.TCP_KEEPALIVE_CNT, DEAD // PROBE)
        made.set(zmq.TCP_MAXRT, 1000 * DEAD)  # TCP_USER_TIMEOUT, for unanswered probes and data
        made.set(zmq.RECONNECT_IVL, RECONNECT_FIRST)
        made.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST)
        made.set(zmq.MAXMSGSIZE, self._max_message)
        self._keep(made, partial(read, made))
        return made

    def _keep(self, socket: Socket, handler: Callable[[], None]) -> None:
        self._made.append(socket)
        self._loop.watch(socket, handler)

    def _secure_listener(self, router: Socket, endpoint: str) -> None:
        tcp = endpoint.startswith("tcp:")
        router.set(zmq.CURVE_SERVER, int(tcp and self._keys is not None))
        if not tcp or self._keys is None:
            return
        if not self._keys.server_secret:
            what = f"the key file has no server key, yet this process listens on {endpoint}"
            raise InvalidSettings(what, "give it the key file that was made for this process")
        router.set(zmq.CURVE_SECRETKEY, self._keys.server_secret.encode())
        if self._authenticator is None:
            self._authenticator = ZapAuthenticator(self._context, self._keys)
            self._loop.watch(self._authenticator.socket, self._authenticate)

    def _authenticate(self) -> None:
        assert self._authenticator is not None
        before = self._authenticator.refused
        self._authenticator.answer()
        if self._authenticator.refused > before:
            self._on_refused("key", "its key is not authorised here")

    def _watch_connection(
        self, dealer: Socket, on_connected: Callable[[Connection], None], on_closed: Callable[[bool], None]
    ) -> None:
        events = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        monitor = dealer.get_monitor_socket(events)

        def changed() -> None:
            event, value = _event(monitor)
            if event == zmq.EVENT_CONNECTED:
                self._dialled[dealer] = Connection(value)
            elif event == zmq.EVENT_DISCONNECTED:
                connection = self._dialled.pop(dealer, None)
                on_closed(connection is not None and connection.ended)
            elif (connection := self._dialled.get(dealer)) is not None:
                on_connected(connection)

        self._keep(monitor, changed)

    def _poll(self) -> None:
        """Close connections on which nothing is acknowledged, and probed connections that are not answered."""
        now = time.monotonic()
        pause, self._polled = now - self._polled - LOOK, now
        for dealer in self._probed & self._dialled.keys():
            if pause > LOOK:
                self._dialled[dealer].excuse(pause)
            if self._dialled[dealer].deaf() > DEAF:
                self._dialled[dealer].shut_down()
        ages = {connection: connection.unanswered() for connection in self._dialled.values()}
        dead = {connection.peer for connection, age in ages.items() if age > UNANSWERED}
        for connection, age in ages.items():
            # Other connections to the same host are probably dead too, but idle ones do not show it.
            if age > UNANSWERED or (connection.peer in dead and connection.quiet() > UNANSWERED):
                connection.shut_down()

    def _watch_accepted(self, router: Socket, on_closed: Callable[[int], None]) -> None:
        failures = (
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        monitor = router.get_monitor_socket(failures | zmq.EVENT_DISCONNECTED | zmq.EVENT_ACCEPTED)

        def report() -> None:
            while int(monitor.get(zmq.EVENTS)) & zmq.POLLIN:
                event, value = _event(monitor)
                if event == zmq.EVENT_ACCEPTED:
                    self._unknown.accepted(value)
                elif event == zmq.EVENT_DISCONNECTED:
                    self._unknown.forget(value)
                    on_closed(value)
                else:
                    self._on_refused("handshake", "it does not speak this protocol, or has no key of this job")

        self._report_accepted = report
        self._keep(monitor, report)


def _event(monitor: Socket) -> tuple[int, int]:
    """The next event and its value. Like zmq.utils.monitor, whose import of asyncio takes a tenth of geomx's start."""
    event, value = struct.unpack_from("=HI", monitor.recv_multipart()[0])
    return event, value


def _widen(socket: Socket, endpoint: str) -> None:
    """Enlarge a unix socket's buffer, which would take many turns for a slice; TCP sizes its own."""
    size = LOCAL_BUFFER if endpoint.startswith("ipc:") else -1
    socket.set(zmq.SNDBUF, size)
    socket.set(zmq.RCVBUF, size)


def _raise_descriptor_limit() -> None:
    """Raise the limit on descriptors to this user's maximum. If none are left, libzmq retries in a busy loop."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
