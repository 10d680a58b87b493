"""Connections by paramiko, with mutual authentication: every step has a timeout, every error a hint."""

import errno
import logging
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import paramiko

from geomx_cli.core.errors import HostUnreachable
from geomx_cli.core.untrusted import first_line
from geomx_cli.hosts.ssh import remedies
from geomx_cli.hosts.ssh.connection import Session
from geomx_cli.hosts.ssh.credentials import Credential, Hop
from geomx_cli.hosts.ssh.host_keys import CERTIFICATE_TYPES, check_host_key, known_types
from geomx_cli.hosts.ssh.options import SshOptions

__all__ = ["ParamikoConnection"]

_ASK = 1.0  # seconds
_SILENT = 40  # consecutive receive timeouts of 0.1 s each
_DEAD = 3500  # milliseconds that sent data may stay unacknowledged
_PROHIBITED = 1  # RFC 4254, 5.1: administratively prohibited
_END = 2.0
_FIRST = 64  # bytes

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
        if len(self.first) < _FIRST:
            self.first += data[:_FIRST]
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ParamikoConnection:
    """The transports to a host and to the jump hosts on the way. Created by one thread, then thread-safe.

    A thread sends a keepalive request each second. If the host, a jump host or the network is lost, the connection
    breaks within 5 seconds: `active` becomes False and all waits on it end.
    """

    def __init__(self, host: str, hops: Sequence[Hop], options: SshOptions) -> None:
        """Connect. Raises HostUnreachable with the host's name, the failed step and the cause."""
        self._transports: list[paramiko.Transport] = []
        self._closed = threading.Event()
        jump = False
        try:
            with ExitStack() as stack:
                agents = {where: stack.enter_context(_ssh_agent(where)) for where in {hop.agent for hop in hops}}
                credentials = [options.credentials.of(hop, agents[hop.agent]) for hop in hops]
                for hop, (known, left_out) in zip(hops, credentials, strict=True):
                    jump = hop is not hops[-1]
                    stream = self._advance(hop, known, left_out, options)
            stream.watched = True
            threading.Thread(target=self._ask, name=f"answers of {host}", daemon=True).start()
        except HostUnreachable as error:
            self.close()
            raise remedies.at(host, error, jump=jump) from None
        except BaseException:
            self.close()
            raise

    @property
    def active(self) -> bool:
        """Whether it is not known to be broken."""
        return bool(self._transports[-1].is_active())

    def open_session(self, limit: float) -> Session:
        """See Connection.open_session."""
        session: Session = self._transports[-1].open_session(timeout=limit)
        return session

    def open_files(self) -> paramiko.SFTPClient:
        """See Connection.open_files."""
        files = paramiko.SFTPClient.from_transport(self._transports[-1])
        assert files is not None
        return files

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
                self._transports[-1].global_request("keepalive@openssh.com", wait=True)

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
        end = time.monotonic() + remedies.TURNED_AWAY
        while True:
            stream = _Stream(self._dial(hop))
            transport = paramiko.Transport(stream)
            try:
                _negotiate(transport, hop, stream)
                return transport, stream
            except EOFError:
                transport.close()
                if time.monotonic() > end:
                    raise remedies.closed_at_once(hop) from None
                time.sleep(random.uniform(0.1, 1.0))
            except BaseException:
                transport.close()
                raise

    def _dial(self, hop: Hop) -> Any:
        if not self._transports:
            return _dial(hop)
        place = (hop.address, hop.port)
        try:
            return self._transports[-1].open_channel("direct-tcpip", place, ("127.0.0.1", 0), timeout=remedies.TCP)
        except paramiko.ChannelException as error:
            raise remedies.forwarding_failed(hop, forbidden=error.code == _PROHIBITED) from None
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
        raise remedies.no_such_name(hop.address, str(getattr(error, "strerror", None) or error)) from None
    end, problem = time.monotonic() + remedies.TCP, OSError("it has no address")
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
        return remedies.silent(hop)
    if error.errno == errno.ECONNREFUSED:
        return remedies.refused(hop)
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return remedies.no_route(hop)
    return remedies.unreachable(hop, error.strerror or str(error))


def _negotiate(transport: paramiko.Transport, hop: Hop, stream: _Stream) -> None:
    """Raises EOFError if the peer closes the connection before its banner."""
    transport.banner_timeout = transport.handshake_timeout = remedies.BANNER
    transport.auth_timeout = remedies.AUTH
    _prefer(transport, known_types(hop))
    try:
        transport.start_client(timeout=2 * remedies.BANNER)
        transport.get_remote_server_key()
    except paramiko.IncompatiblePeer as error:
        raise remedies.no_algorithm(hop, str(error)) from None
    except (paramiko.SSHException, EOFError, OSError) as error:
        if transport.remote_version:
            raise remedies.no_key_exchange(hop, str(error)) from None
        away = stream.first.decode(errors="replace").startswith(remedies.AWAY)
        if stream.first and not away:
            raise remedies.not_ssh(hop) from None
        if stream.ended or away:
            raise EOFError from None
        raise remedies.no_banner(hop) from None


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
            raise remedies.takes_no_keys(hop, tried, ", ".join(error.allowed_types)) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            if "timeout" in str(error).lower():
                raise remedies.slow_authentication(hop, remedies.AUTH) from None
            if transport.is_active() and isinstance(error, paramiko.AuthenticationException):
                continue
            if len(tried) == 1:
                why = [f"it broke off: {first_line(error)}"]
                raise remedies.not_let_in(hop, tried, why, "see the log of its sshd") from None
            raise remedies.too_many_keys(hop, tried, f"{len(tried)} of {len(credentials)} keys") from None
        if not more:
            return
        raise remedies.second_factor(hop, tried, ", ".join(more))
    raise remedies.not_let_in(hop, tried, left_out)
