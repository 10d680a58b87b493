"""Encryption and authentication of datagrams: ChaCha20-Poly1305, with a key for each sender, receiver and incarnation.

A datagram: session number and channel of the receiver's choice, and a counter (struct OUTER, authenticated), then the
ciphertext with its tag. Channel and counter are the nonce. A window of the newest counters of each channel refuses
replays; datagrams older than that are refused too.
"""

import struct

import zmq.utils.z85
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from geomx_cli.ps.net.security import KeyRing
from geomx_cli.ps.net.wire import BadMessage

__all__ = ["MAX_CHANNELS", "OVERHEAD", "SALT", "Opener", "Sealer", "session_key", "session_of"]

OUTER = struct.Struct("<IBQ")
OVERHEAD = OUTER.size + 16
"""Bytes that sealing adds."""
MAX_CHANNELS = 8
SALT = 16
"""Bytes that each end contributes to a key."""
REPLAY_WINDOW = 4096


def session_key(keys: KeyRing | None, sender: str, receiver: str, salt: bytes, *, sends: bool) -> bytes:
    """The key of datagrams between two processes, the same at both ends, for this pair of salts.

    It is derived (HKDF) from the Diffie-Hellman secret of the CurveZMQ keys of the dialling end, which sends, and of
    the job's listening processes. Without keys, where processes listen on private addresses only, from the salts, which
    the link has carried. Raises BadMessage if the receiver knows no key of the sender.
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
        """That of the next datagram on each channel."""
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
        before, or too late to tell.
        """
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
    """Which of the newest counters were received."""

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
