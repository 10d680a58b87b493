"""SSH connections with mutual authentication: every step has a timeout, every error a hint."""

import errno
import logging
import random
import shlex
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import paramiko

from geomx_cli.core.errors import HostUnreachable
from geomx_cli.core.untrusted import first_line
from geomx_cli.hosts.ssh.credentials import Credential, Hop
from geomx_cli.hosts.ssh.host_keys import CERTIFICATE_TYPES, check_host_key, known_types
from geomx_cli.hosts.ssh.options import SshOptions

__all__ = ["Connection"]

_TCP = 8.0  # seconds
_BANNER = 8.0
_AUTH = 20.0
_ASK = 1.0
_SILENT = 40  # consecutive receive timeouts of 0.1 s each
_DEAD = 3500  # milliseconds that sent data may stay unacknowledged
_PROHIBITED = 1  # RFC 4254, 5.1: administratively prohibited
_END = 2.0
_TURNED_AWAY = 6.0  # seconds to retry if sshd closes connections at once because of too many pending ones

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # errors are reported as exceptions


class _Stream:
    """A socket or channel wrapper that records the peer's first bytes and end of stream.

    While `watched`, a receive timeout is treated as end of stream. Timeouts are counted instead of using a clock, so
    that suspension of this process (laptop sleep, SIGSTOP) does not count.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._silent = 0
        self.first = b""
        self.ended = False
        self.watched = False

    def recv(self, size: int) -> bytes:
        """Same as socket.recv."""
        try:
            data: bytes = self._stream.recv(size)
        except TimeoutError:  # raised by paramiko after 0.1 s
            self._silent += 1
            if not self.watched or self._silent < _SILENT:
                raise
            data = b""
        except ConnectionError:
            data = b""
        self._silent = 0
        self.ended = not data
        if len(self.first) < 4:
            self.first += data[:4]
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Connection:
    """The transports to a host and to the jump hosts on the way. Created by one thread, then thread-safe.

    A thread sends a keepalive request each second. If the host, a jump host or the network is lost, the connection
    breaks within 5 seconds: `active` becomes False and all waits on it end.
    """

    def __init__(self, host: str, hops: Sequence[Hop], options: SshOptions) -> None:
        """Connect. Raises HostUnreachable with the host's name, the failed step and the cause."""
        self._transports: list[paramiko.Transport] = []
        self._closed = threading.Event()
        way = ""
        try:
            with ExitStack() as stack:
                agents = {where: stack.enter_context(_ssh_agent(where)) for where in {hop.agent for hop in hops}}
                credentials = [options.credentials.of(hop, agents[hop.agent]) for hop in hops]
                for hop, (known, left_out) in zip(hops, credentials, strict=True):
                    way = "" if hop is hops[-1] else "jump host: "
                    stream = self._advance(hop, known, left_out, options)
            stream.watched = True
            threading.Thread(target=self._ask, name=f"answers of {host}", daemon=True).start()
        except HostUnreachable as error:
            self.close()
            raise type(error)(f"host {host}: {way}{error.message}", error.hint) from None
        except BaseException:
            self.close()
            raise

    @property
    def transport(self) -> paramiko.Transport:
        """The transport to the host itself."""
        return self._transports[-1]

    @property
    def active(self) -> bool:
        """Whether it is not known to be broken."""
        return bool(self.transport.is_active())

    def close(self) -> None:
        """Close all transports; pending operations end."""
        self._closed.set()
        for transport in reversed(self._transports):
            transport.close()
            # A transport being closed by another thread sends its last message through the previous hop.
            if transport.is_alive() and transport is not threading.current_thread():
                transport.join(_END)

    def _ask(self) -> None:
        """Send keepalive requests until the connection breaks; any reply counts."""
        while self.active and not self._closed.wait(_ASK):
            with suppress(paramiko.SSHException, EOFError, OSError):
                self.transport.global_request("keepalive@openssh.com", wait=True)

    def _advance(
        self, hop: Hop, credentials: Sequence[Credential], left_out: Sequence[str], options: SshOptions
    ) -> _Stream:
        transport, stream = self._greet(hop)
        self._transports.append(transport)
        check_host_key(hop, transport.get_remote_server_key(), options)
        _log_in(transport, hop, credentials, left_out)
        return stream

    def _greet(self, hop: Hop) -> tuple[paramiko.Transport, _Stream]:
        """Connect and negotiate; retry while the peer closes the connection before its banner."""
        end = time.monotonic() + _TURNED_AWAY
        while True:
            stream = _Stream(self._dial(hop))
            transport = paramiko.Transport(stream)
            try:
                _negotiate(transport, hop, stream)
                return transport, stream
            except EOFError:
                transport.close()
                if time.monotonic() > end:
                    hint = "its MaxStartups limit may be reached, or it refuses this address"
                    raise HostUnreachable(f"{hop} closes connections at once", hint) from None
                time.sleep(random.uniform(0.1, 1.0))
            except BaseException:
                transport.close()
                raise

    def _dial(self, hop: Hop) -> Any:
        if not self._transports:
            return _dial(hop)
        place = (hop.address, hop.port)
        try:
            return self._transports[-1].open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=_TCP)
        except paramiko.ChannelException as error:
            forbidden = error.code == _PROHIBITED
            what = "the jump host forbids forwarding" if forbidden else "the jump host cannot connect to it"
            hint = "allow AllowTcpForwarding there" if forbidden else "correct the address, or look whether sshd runs"
            raise HostUnreachable(f"{hop} cannot be reached: {what}", hint) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            what = f"{hop} cannot be reached through its jump host: {error}"
            raise HostUnreachable(what, "check the network from the jump host") from None


class _AgentAt(paramiko.Agent):  # type: ignore[misc]
    """The ssh-agent at a socket that ssh_config names."""

    def __init__(self, place: str) -> None:
        super(paramiko.Agent, self).__init__()
        stream = socket.socket(socket.AF_UNIX)
        try:
            stream.connect(place)
            self._connect(stream)
        except (paramiko.SSHException, OSError):
            stream.close()
            raise


@contextmanager
def _ssh_agent(place: str) -> Iterator[Sequence[Any] | None]:
    """Yield the keys of a running ssh-agent; they are usable inside the block. place: see Hop.agent; None is yielded if
    no agent answers at one that is named.
    """
    try:
        if place == "none":
            raise OSError
        agent = _AgentAt(place) if place else paramiko.Agent()
    except (paramiko.SSHException, OSError):
        yield () if place in ("", "none") else None
        return
    try:
        yield agent.get_keys()
    finally:
        agent.close()


def _dial(hop: Hop) -> socket.socket:
    """Open a TCP connection, trying all addresses of the name."""
    try:
        found = socket.getaddrinfo(hop.address, hop.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        what = f"the name {hop.address} is not known: {getattr(error, 'strerror', None) or error}"
        raise HostUnreachable(what, "correct it in the inventory or in ~/.ssh/config") from None
    end, problem = time.monotonic() + _TCP, OSError("it has no address")
    for family, kind, protocol, _, place in found:
        stream = socket.socket(family, kind, protocol)
        stream.settimeout(max(1.0, end - time.monotonic()))
        try:
            stream.connect(place)
        except OSError as error:
            stream.close()
            problem = error
            continue
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD)
        return stream
    raise _unreachable(hop, problem)


def _unreachable(hop: Hop, error: OSError) -> HostUnreachable:
    if isinstance(error, TimeoutError):
        what = f"{hop} does not answer: no connection within {_TCP:g} s"
        return HostUnreachable(what, "is it on, is the address right, does a firewall drop the connection?")
    if error.errno == errno.ECONNREFUSED:
        return HostUnreachable(f"{hop} refuses the connection", "is sshd running there, and on this port?")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return HostUnreachable(f"there is no route to {hop}", "is the address right, and the network up?")
    return HostUnreachable(f"{hop} cannot be reached: {error.strerror or error}", "correct the address")


def _negotiate(transport: paramiko.Transport, hop: Hop, stream: _Stream) -> None:
    """Raises EOFError if the peer closes the connection before its banner."""
    transport.banner_timeout, transport.handshake_timeout, transport.auth_timeout = _BANNER, _BANNER, _AUTH
    _prefer(transport, known_types(hop))
    try:
        transport.start_client(timeout=2 * _BANNER)
        transport.get_remote_server_key()
    except paramiko.IncompatiblePeer as error:
        hint = "its sshd is too old (SHA-1 keys or exchanges only): update it, OpenSSH 7.2 or newer will do"
        raise HostUnreachable(f"no SSH algorithm in common with {hop}: {error}", hint) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if transport.remote_version:
            what = f"{hop} did not complete the SSH key exchange: {error or 'it closed the connection'}"
            raise HostUnreachable(what, "see the log of its sshd; it may be overloaded") from None
        if stream.first:
            raise HostUnreachable(f"{hop} is not an SSH server", "correct the port") from None
        if stream.ended:
            raise EOFError from None
        what = f"{hop} accepts connections but sends no SSH banner within {_BANNER:g} s"
        raise HostUnreachable(what, "is it an SSH server, on this port? It may be overloaded") from None


def _prefer(transport: paramiko.Transport, types: Sequence[str]) -> None:
    """Request host keys of the types known for it."""
    security = transport.get_security_options()
    wanted = [name for kind in types for name in (("rsa-sha2-512", "rsa-sha2-256") if kind == "ssh-rsa" else (kind,))]
    possible = [name for name in dict.fromkeys(wanted) if name in (*security.key_types, *CERTIFICATE_TYPES)]
    security.key_types = (*possible, *(name for name in security.key_types if name not in possible))


def _log_in(
    transport: paramiko.Transport, hop: Hop, credentials: Sequence[Credential], left_out: Sequence[str]
) -> None:
    tried: list[str] = []
    for credential in credentials:
        tried.append(f"{credential.name} ({credential.key.fingerprint})")
        try:
            more = transport.auth_publickey(hop.user, credential.key)
        except paramiko.BadAuthenticationType as error:
            why = f"; it takes no keys, but {', '.join(error.allowed_types)}, which geomx does not give"
            hint = "let its sshd accept keys for this account: PubkeyAuthentication, AuthenticationMethods"
            raise _not_let_in(hop, tried, why, hint) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            if "timeout" in str(error).lower():
                what = f"{hop}: SSH authentication timed out after {_AUTH:g} s"
                raise HostUnreachable(what, "it may be overloaded, or wait for its directory service") from None
            if transport.is_active() and isinstance(error, paramiko.AuthenticationException):
                continue
            why, hint = f"; it broke off: {first_line(error)}", "see the log of its sshd"
            if len(tried) == 1:
                raise _not_let_in(hop, tried, why, hint) from None
            count = f"{len(tried)} of {len(credentials)}"
            why = f"; it closed the connection after {count} keys, as sshd does after its MaxAuthTries"
            hint = "name its key: key in the inventory, or IdentityFile in ~/.ssh/config, or remove others (ssh-add -d)"
            raise _not_let_in(hop, tried, why, hint) from None
        if not more:
            return
        why = f"; it accepts the last one and wants a second factor: {', '.join(more)}"
        hint = (
            "geomx gives none: let its sshd ask this account for a key alone (AuthenticationMethods publickey), at"
            " least from this machine (Match User ... Address ...)"
        )
        raise _not_let_in(hop, tried, why, hint)
    key = f"-i {shlex.quote(hop.keys[0] + '.pub')} " if hop.named and hop.keys else ""
    copy = f"ssh-copy-id {key}-p {hop.port} {shlex.quote(f'{hop.user}@{hop.address}')}"
    why = "".join(f"; {each}" for each in left_out)
    raise _not_let_in(hop, tried, why, f"{copy}, or name another user or key in the inventory")


def _not_let_in(hop: Hop, tried: Sequence[str], why: str, hint: str) -> HostUnreachable:
    keys = f"tried {', '.join(tried)}" if tried else "there is no key to try"
    return HostUnreachable(f"SSH authentication failed for {hop}: {keys}{why}", hint)
