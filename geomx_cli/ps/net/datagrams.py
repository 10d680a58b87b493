"""UDP sockets: a sender has one for each channel, and a receiver has one.

Channels differ in their DSCP, which descends with the channel's number. So networks that honour DSCP drop the least
important datagrams first. Datagrams are never fragmented: they are as long as the path carries, as far as the kernel
knows. If the kernel can, it sends many in one call (UDP_SEGMENT), and reads many in one call (UDP_GRO).
"""

import errno
import socket
import struct
from collections.abc import Iterator, Sequence

import zmq.utils.z85
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geomx_cli.contract.security import KeyRing
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.net.wire import BadMessage

__all__ = [
    "MAX_BATCH", "MAX_CHANNELS", "OVERHEAD", "Opener", "ReceiverSocket", "SALT", "Sealer", "SenderSocket",
    "session_key", "session_of",
]  # fmt: skip

# Encryption and authentication of datagrams: ChaCha20-Poly1305, with a key for each sender, receiver and incarnation. A
# datagram begins with a session number and channel, which the receiver chooses, and a counter (struct OUTER,
# authenticated). The ciphertext with its tag follows. Channel and counter are the nonce. A window of the newest
# counters of each channel refuses replays, and datagrams older than the window.

OUTER = struct.Struct("<IBQ")
OVERHEAD = OUTER.size + 16
"""Bytes that sealing adds."""
MAX_CHANNELS = 8
SALT = 16
"""Bytes that each end contributes to a key."""
REPLAY_WINDOW = 4096


def session_key(keys: KeyRing | None, sender: str, receiver: str, salt: bytes, *, sends: bool) -> bytes:
    """The key of datagrams between two processes, the same at both ends, for this pair of salts.

    It is derived (HKDF) from a Diffie-Hellman secret of two CurveZMQ keys: the key of the dialling end, which sends,
    and the key of the job's listening processes. Without keys, processes listen on private addresses only. Then it is
    derived from the salts, which the link has carried. Raises BadMessage if the receiver knows no key of the sender.
    """
    secret = b"no keys"
    if keys is not None and sends:
        secret = _shared(keys.private, keys.server_public)
    elif keys is not None:
        public = next((key for key, known in keys.allowed.items() if known.process == sender), None)
        if public is None or not keys.server_secret:
            raise BadMessage(f"datagrams of {sender}, whose key is not known here")
        secret = _shared(keys.server_secret, public)
    job = "" if keys is None else keys.job
    info = "\0".join(("geomx datagrams", job, sender, receiver)).encode()
    return HKDF(SHA256(), 32, salt, info).derive(secret)


def _shared(private: str, public: str) -> bytes:
    own = X25519PrivateKey.from_private_bytes(zmq.utils.z85.decode(private))
    return own.exchange(X25519PublicKey.from_public_bytes(zmq.utils.z85.decode(public)))


class Sealer:
    """Makes the datagrams of one session."""

    def __init__(self, key: bytes, session: int) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._session = session
        self._counters = [0] * MAX_CHANNELS

    @property
    def counters(self) -> list[int]:
        """The counter of the next datagram on each channel."""
        return list(self._counters)

    def seal(self, channel: int, content: bytes) -> bytes:
        """The next datagram on a channel."""
        outer = OUTER.pack(self._session, channel, self._counters[channel])
        self._counters[channel] += 1
        return outer + self._cipher.encrypt(_nonce(outer), content, outer)


class Opener:
    """Checks and decrypts the datagrams of one session."""

    def __init__(self, key: bytes) -> None:
        self._cipher = ChaCha20Poly1305(key)
        self._windows = [_ReplayWindow() for _ in range(MAX_CHANNELS)]

    def open(self, datagram: bytes) -> tuple[int, int, bytes]:
        """Channel, counter and content. Raises BadMessage for a datagram that is not authentic, that was received
        before, or that is too old to tell.
        """
        # The window is read before the cipher runs, because the cipher costs more. It is extended only afterwards.
        # Otherwise anyone who can send datagrams could make the genuine ones look old.
        outer = datagram[: OUTER.size]
        _, channel, counter = OUTER.unpack(outer)
        if channel >= MAX_CHANNELS or not self._windows[channel].is_new(counter):
            raise BadMessage("a datagram that was received before")
        try:
            content = self._cipher.decrypt(_nonce(outer), datagram[OUTER.size :], outer)
        except InvalidTag:
            raise BadMessage("a datagram that is not authentic") from None
        self._windows[channel].add(counter)
        return channel, counter, content


class _ReplayWindow:
    """Which of the newest counters have been received."""

    def __init__(self) -> None:
        self._highest, self._received = -1, 0  # bit n: the counter n below the highest

    def is_new(self, counter: int) -> bool:
        behind = self._highest - counter
        return behind < 0 or (behind < REPLAY_WINDOW and not self._received >> behind & 1)

    def add(self, counter: int) -> None:
        ahead = counter - self._highest
        if ahead > 0:
            kept = self._received << ahead if ahead < REPLAY_WINDOW else 0
            self._received, self._highest = (kept | 1) & ((1 << REPLAY_WINDOW) - 1), counter
        else:
            self._received |= 1 << -ahead


def _nonce(outer: bytes) -> bytes:
    """Twelve bytes: channel and counter."""
    return outer[4:5] + bytes(3) + outer[5:]


def session_of(datagram: bytes) -> int:
    """The session that a datagram claims. Raises BadMessage if it is too short."""
    if len(datagram) < OVERHEAD:
        raise BadMessage("a datagram that is too short")
    return int.from_bytes(datagram[:4], "little")


# Not in Python's socket module; see linux/in.h, in6.h and udp.h.
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU = 10, 2, 14
IPV6_MTU_DISCOVER, IPV6_MTU = 23, 24
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104

MAX_BATCH, MAX_BATCH_BYTES = 64, 60_000
LARGEST, SMALLEST = 9_000, 1_280
"""Bytes of an IP packet: the size of jumbo frames, and the size that every path of IPv6 carries."""
SEND_BUFFER, RECEIVE_BUFFER = 4 * 2**20, 8 * 2**20
READ_AT_ONCE = 64


class SenderSocket:
    """Sends the datagrams of one channel. Raises OSError if no route leads to the address.

    address: host and port.
    precedence: the class of its DSCP, 0 to 7.
    size: bytes of a datagram that fit the path, as far as known.
    """

    def __init__(self, address: tuple[str, int], precedence: int) -> None:
        family, _, _, _, where = socket.getaddrinfo(*address, type=socket.SOCK_DGRAM)[0]
        self._is_v6 = family == socket.AF_INET6
        self._socket = made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        if self._is_v6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, precedence << 5)
            made.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, IP_PMTUDISC_DO)
        else:
            made.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, precedence << 5)
            made.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        made.connect(where)
        self._segments = True
        self.size = self._path_size()

    def send(self, datagrams: Sequence[bytes]) -> bool:
        """Send datagrams of one length, at most `batch` of them. Returns False if the kernel has no room for them now.
        Datagrams that the network refuses are lost.
        """
        try:
            if self._segments and len(datagrams) > 1:
                length = struct.pack("H", len(datagrams[0]))
                self._socket.sendmsg(datagrams, [(SOL_UDP, UDP_SEGMENT, length)])
            else:
                for datagram in datagrams:
                    self._socket.send(datagram)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self.size = self._path_size()
            elif self._segments and error.errno in (errno.EINVAL, errno.EIO, errno.EOPNOTSUPP):
                self._segments = False
                return self.send(datagrams)
        return True

    def close(self) -> None:
        """Send nothing more. Later datagrams are lost."""
        self._socket.close()

    @staticmethod
    def batch(length: int) -> int:
        """How many datagrams of this length may be sent at once."""
        return max(1, min(MAX_BATCH, MAX_BATCH_BYTES // length))

    def _path_size(self) -> int:
        """The bytes that an IP packet on this path carries, without its headers."""
        where = (socket.IPPROTO_IPV6, IPV6_MTU) if self._is_v6 else (socket.IPPROTO_IP, IP_MTU)
        try:
            path = self._socket.getsockopt(*where)
        except OSError:
            path = SMALLEST
        return max(SMALLEST, min(LARGEST, path)) - (48 if self._is_v6 else 28)

    @property
    def least(self) -> int:
        """A size that fits any path."""
        return SMALLEST - (48 if self._is_v6 else 28)


class ReceiverSocket:
    """A socket that receives datagrams at `host` and `port` (0 for any). Raises InvalidSettings if that is impossible.
    """

    def __init__(self, host: str, port: int) -> None:
        family, _, _, _, where = socket.getaddrinfo(host or None, port, type=socket.SOCK_DGRAM)[0]
        self._socket = made = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            made.bind(where)
        except OSError as error:
            made.close()
            what = f"cannot receive datagrams at {host} port {port} (UDP): {error.strerror}"
            raise InvalidSettings(what, "end the program that holds the port, or choose another delivery") from None
        try:
            made.setsockopt(SOL_UDP, UDP_GRO, 1)
        except OSError:
            pass  # each read has one datagram
        self.port = int(made.getsockname()[1])

    def fileno(self) -> int:
        """The descriptor, to wait for datagrams."""
        return self._socket.fileno()

    def read(self) -> Iterator[bytes]:
        """The datagrams that have arrived. If there are very many, it returns only a part, so that other work of the
        loop is not delayed.
        """
        for _ in range(READ_AT_ONCE):
            try:
                data, about, _, _ = self._socket.recvmsg(65_536, 64)
            except OSError:
                return
            length = next((int.from_bytes(item[:2], "little") for _, kind, item in about if kind == UDP_GRO), 0)
            step = length or max(1, len(data))
            yield from (data[at : at + step] for at in range(0, len(data), step))
