"""A machine behind SSH as a host."""

import io
import shlex
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any, TypeVar

import paramiko

from geomx_cli.errors import HostUnreachable, TimedOut
from geomx_cli.hosts import Channel, Completed, SshOptions
from geomx_cli.hosts.connection import Connection
from geomx_cli.hosts.ssh_config import hops
from geomx_cli.inventory import Ssh

__all__ = ["SshHost"]

_CHUNK = 1 << 16
_PIECE = 1 << 20
_ERRORS = 4096
_BEGIN = 10.0  # seconds for a command to be started
_FILES = 20.0  # for files to be dealt with, besides
_SLOWEST = 1 << 16  # bytes/s
_ENDING = 2.0
_MARK = "geomx-command-output-begins"
_Result = TypeVar("_Result")


class SshHost:
    """Connects when it is first used, and again when it is used after the connection broke.

    Commands run as the login user's shell runs them, without a terminal, in the home directory. Nothing secret
    may be in argv: it is seen by everybody on that machine. What the account's start-up files print is left out.
    """

    def __init__(self, name: str, ssh: Ssh, python: str, *, options: SshOptions) -> None:
        self.name = name
        self.python = python
        self._ssh = ssh
        self._options = options
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._files: paramiko.SFTPClient | None = None
        self._files_lock = threading.Lock()  # paramiko's is made for one thread at a time

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """See Host.run."""
        what = f"{argv[0]} on {self.name} did not end within {limit:g} s"
        with self._session(limit) as session, self._limit(limit, session.close, what):
            session.exec_command(self._command(argv))
            sender = _in_thread(lambda: _send_all(session, data))
            output, errors, own = io.BytesIO(), io.BytesIO(), _OwnOutput()
            listener = _in_thread(lambda: _drain(session.recv_stderr, errors.write))
            _drain(session.recv, lambda data: output.write(own.of(data)))
            status = session.recv_exit_status()
            listener.join()
            sender.join()
            if not session.exit_status_ready() or (status == -1 and not self._active()):
                raise HostUnreachable(f"host {self.name}: the connection broke", "launch again")
        return Completed(status, output.getvalue(), errors.getvalue())

    def open(self, argv: Sequence[str]) -> Channel:
        """See Host.open."""
        session = self._open_session(_BEGIN)
        with self._limit(_BEGIN, session.close, f"{argv[0]} on {self.name} was not started within {_BEGIN:g} s"):
            session.exec_command(self._command(argv))
        return _SshChannel(session)

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """See Host.put. The file has its mode before it has a content."""
        part = f"{path}.{threading.get_ident()}.part"

        def put(files: paramiko.SFTPClient) -> None:
            try:
                file = files.open(part, "wb")
            except FileNotFoundError:
                _make_folders(files, PurePosixPath(path).parent)
                file = files.open(part, "wb")
            try:
                with file:
                    file.chmod(mode)
                    file.set_pipelined(True)
                    for start in range(0, len(data), _PIECE):
                        file.write(data[start : start + _PIECE])
                files.posix_rename(part, path)
            except OSError:
                with suppress(OSError):
                    files.remove(part)
                raise

        self._with_files(put, f"{path} on {self.name} was not written", len(data))

    def get(self, path: str) -> bytes:
        """See Host.get."""

        def get(files: paramiko.SFTPClient) -> bytes:
            with files.open(path, "rb") as file:
                file.prefetch()
                return bytes(file.read())

        return self._with_files(get, f"{path} on {self.name} was not read", 1 << 26)

    def close(self) -> None:
        """See Host.close."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = self._files = None

    def _command(self, argv: Sequence[str]) -> str:
        return shlex.join(["sh", "-c", 'echo "$0" && exec "$@"', _MARK, *argv])

    def _connected(self) -> tuple[Connection, bool]:
        """The connection, and whether it was made just now."""
        with self._lock:
            if self._connection is not None and self._connection.active:
                return self._connection, False
            if self._connection is not None:
                self._connection.close()
            self._files = self._connection = None
            self._connection = Connection(self.name, hops(self._ssh, self._options), self._options)
            return self._connection, True

    def _active(self) -> bool:
        with self._lock:
            return self._connection is not None and self._connection.active

    def _open_session(self, limit: float) -> paramiko.Channel:
        connection, fresh = self._connected()
        try:
            return connection.transport.open_session(timeout=min(limit, _BEGIN))
        except paramiko.ChannelException as error:
            hint = "MaxSessions in its sshd_config may be too small: 10, the default, is enough"
            raise HostUnreachable(f"host {self.name} opens no session: {error.text}", hint) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not fresh and "Timeout" not in str(error):  # it has broken since, and we see it only now
                connection.close()
                return self._open_session(limit)
            raise HostUnreachable(f"host {self.name} opens no session: {error}", "launch again") from None

    @contextmanager
    def _session(self, limit: float) -> Iterator[paramiko.Channel]:
        session = self._open_session(limit)
        try:
            yield session
        finally:
            with suppress(OSError, EOFError, paramiko.SSHException):
                session.close()

    @contextmanager
    def _limit(self, limit: float, end: Callable[[], object], what: str) -> Iterator[None]:
        """Call `end`, from another thread, when the block takes too long; it then raises TimedOut.

        What paramiko raises in the block because the connection broke becomes HostUnreachable.
        """
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            with suppress(OSError, EOFError, paramiko.SSHException):
                end()

        timer = threading.Timer(limit, expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (paramiko.SSHException, EOFError, OSError, HostUnreachable) as error:
            if expired.is_set():
                raise TimedOut(what) from None
            if isinstance(error, HostUnreachable) or (isinstance(error, OSError) and self._active()):
                raise
            raise HostUnreachable(f"host {self.name}: the connection broke: {error}", "launch again") from None
        finally:
            timer.cancel()
        if expired.is_set():
            raise TimedOut(what)

    def _with_files(self, do: Callable[[paramiko.SFTPClient], _Result], what: str, size: int) -> _Result:
        limit = _FILES + size / _SLOWEST
        with self._files_lock:
            transport = self._connected()[0].transport
            with self._limit(limit, transport.close, f"{what} within {limit:g} s"):
                if self._files is None:
                    self._files = paramiko.SFTPClient.from_transport(transport)
                    assert self._files is not None
                return do(self._files)


class _SshChannel:
    """A session's streams as a channel. A thread takes what the command writes on its standard error."""

    def __init__(self, session: paramiko.Channel) -> None:
        self._session = session
        self._own = _OwnOutput()
        self._errors = b""
        self._listener = _in_thread(lambda: _drain(session.recv_stderr, self._note))

    def send(self, data: bytes) -> None:
        self._session.sendall(data)

    def receive(self) -> bytes:
        with suppress(OSError):
            while data := self._session.recv(_CHUNK):
                if own := self._own.of(data):
                    return own
        return b""

    def errors(self) -> str:
        if self._session.closed or self._session.exit_status_ready():
            self._listener.join(_ENDING)
        return self._errors.decode(errors="replace")

    def close(self) -> None:
        with suppress(OSError, EOFError, paramiko.SSHException):
            self._session.shutdown_write()

    def _note(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-_ERRORS:]


class _OwnOutput:
    """Tells a command's output from what the account's start-up files have printed before it."""

    def __init__(self) -> None:
        self._before: bytes | None = b""

    def of(self, data: bytes) -> bytes:
        """The part of `data` that is the command's; b"" when there is none yet."""
        if self._before is None:
            return data
        _, mark, own = (self._before + data).partition(_MARK.encode() + b"\n")
        self._before = None if mark else (self._before + data)[-_ERRORS:]
        return own


def _in_thread(do: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    return thread


def _send_all(session: paramiko.Channel, data: bytes) -> None:
    with suppress(OSError, EOFError, paramiko.SSHException):  # a command need not read its input
        session.sendall(data)
        session.shutdown_write()


def _drain(receive: Callable[[int], bytes], take: Callable[[bytes], Any]) -> None:
    with suppress(OSError):
        while data := receive(_CHUNK):
            take(data)


def _make_folders(files: paramiko.SFTPClient, folder: PurePosixPath) -> None:
    try:
        files.mkdir(str(folder), 0o700)
    except FileNotFoundError:
        _make_folders(files, folder.parent)
        files.mkdir(str(folder), 0o700)
    except OSError:  # SFTP has no word for "exists"
        if not stat.S_ISDIR(files.stat(str(folder)).st_mode or 0):
            raise
