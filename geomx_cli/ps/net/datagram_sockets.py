"""UDP sockets: of a sender, one for each channel, and of a receiver.

Channels differ in their DSCP, which descends with the channel's number, so that networks which honour it drop the least
important first. Datagrams are never fragmented: they are as long as the path takes, as far as the kernel knows. Where
the kernel can, many are sent in one call (UDP_SEGMENT) and read in one call (UDP_GRO).
"""

import errno
import socket
import struct
from collections.abc import Iterator, Sequence

from geomx_cli.core.errors import InvalidSettings

__all__ = ["MAX_BATCH", "ReceiverSocket", "SenderSocket"]

# Not in Python's socket module; see linux/in.h, in6.h and udp.h.
IP_MTU_DISCOVER, IP_PMTUDISC_DO, IP_MTU = 10, 2, 14
IPV6_MTU_DISCOVER, IPV6_MTU = 23, 24
SOL_UDP, UDP_SEGMENT, UDP_GRO = 17, 103, 104

MAX_BATCH, MAX_BATCH_BYTES = 64, 60_000
LARGEST, SMALLEST = 9_000, 1_280
"""Bytes of an IP packet: of jumbo frames, and what every path of IPv6 takes."""
SEND_BUFFER, RECEIVE_BUFFER = 4 * 2**20, 8 * 2**20
READ_AT_ONCE = 64


class SenderSocket:
    """Sends the datagrams of one channel to one address (host, port). `precedence`, 0 to 7, is the class of its DSCP.

    size: bytes of a datagram that fit the path, as far as known. Raises OSError if there is no way to the address.
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
        What the network refuses is lost.
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

    @staticmethod
    def batch(length: int) -> int:
        """How many datagrams of this length may be sent at once."""
        return max(1, min(MAX_BATCH, MAX_BATCH_BYTES // length))

    def _path_size(self) -> int:
        """What an IP packet on this path carries, without its headers."""
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
    """A socket that receives datagrams at `host` and `port`, 0 for any. Raises InvalidSettings if it cannot."""

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
        """The datagrams that have arrived; of very many some, so that others have their turn."""
        for _ in range(READ_AT_ONCE):
            try:
                data, about, _, _ = self._socket.recvmsg(65_536, 64)
            except OSError:
                return
            length = next((int.from_bytes(item[:2], "little") for _, kind, item in about if kind == UDP_GRO), 0)
            step = length or max(1, len(data))
            yield from (data[at : at + step] for at in range(0, len(data), step))
