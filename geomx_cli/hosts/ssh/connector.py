"""Connector for a host behind SSH."""

import errno
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import TypeVar

import paramiko

from geomx_cli.core.errors import CheckFailed, HostUnreachable, TimedOut
from geomx_cli.core.untrusted import first_line, plain
from geomx_cli.hosts.interface import Channel, Completed
from geomx_cli.hosts.ssh import remedies
from geomx_cli.hosts.ssh.client import address, connect
from geomx_cli.hosts.ssh.connection import Connection, Session
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.hosts.ssh.streams import (
    LARGEST,
    Kept,
    OwnOutput,
    SshChannel,
    drain,
    in_thread,
    remote_command,
    send_input,
)
from geomx_cli.inventory import Ssh

__all__ = ["SshConnector"]

_PIECE = 1 << 20
_BEGIN = 10.0  # seconds for a command to be started
_FILES = 20.0  # seconds for a file operation, in addition to the transfer
_SLOWEST = 1 << 16  # bytes/s
_SLOW = "see whether that machine is overloaded, or its disk hangs; geomx doctor looks at the link to it"
_Result = TypeVar("_Result")


class SshConnector:
    """Connects on first use, and reconnects when used after the connection broke.

    Commands run through the login user's shell, without a terminal, in the home directory. argv must not contain
    secrets: it is visible to all users of that machine. Output of the account's start-up files is dropped.
    """

    def __init__(self, name: str, ssh: Ssh, python: str, *, options: SshOptions) -> None:
        self.name = name
        self.python = python
        self._ssh = ssh
        self._options = options
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        self._closings = 0
        self._connection: Connection | None = None
        self._files: paramiko.SFTPClient | None = None
        self._files_lock = threading.Lock()  # a paramiko SFTP client is not thread-safe

    @property
    def address(self) -> str:
        """See Connector.address."""
        return address(self._ssh, self._options)

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """See Connector.run."""
        what = f"{argv[0]} on {self.name} did not end within {limit:g} s"
        with self._session(limit) as session, self._limit(limit, session.close, what):
            session.exec_command(remote_command(argv))
            sender = in_thread(lambda: send_input(session, data))
            output, errors, own = Kept(session.close), Kept(session.close), OwnOutput()
            listener = in_thread(lambda: drain(session.recv_stderr, errors.write))
            drain(session.recv, lambda data: output.write(own.of(data)))
            status = session.recv_exit_status()
            listener.join()
            sender.join()
            if output.full or errors.full:
                what = f"{argv[0]} on {self.name} wrote more than {LARGEST >> 20} MiB"
                raise CheckFailed(what, "see what runs there")
            if not session.exit_status_ready() or (status == -1 and not self._active()):
                raise remedies.broken(self.name)
            if not own.begun:
                raise remedies.no_command(self.name, own.before + errors.getvalue().decode(errors="replace"))
        return Completed(status, output.getvalue(), errors.getvalue())

    def open(self, argv: Sequence[str]) -> Channel:
        """See Connector.open."""
        session = self._open_session(_BEGIN)
        with self._limit(_BEGIN, session.close, f"{argv[0]} on {self.name} was not started within {_BEGIN:g} s"):
            session.exec_command(remote_command(argv))
        return SshChannel(session)

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """See Connector.put. The mode is set before the content is written."""
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
        """See Connector.get. Raises OSError (EFBIG) for files of more than 16 MiB."""
        what = f"{path} on {self.name} was not read"
        size = self._with_files(lambda files: files.stat(path).st_size or 0, what, 0)
        if size > LARGEST:
            raise OSError(errno.EFBIG, f"it has more than {LARGEST >> 20} MiB", path)

        def get(files: paramiko.SFTPClient) -> bytes:
            with files.open(path, "rb") as file:
                file.prefetch(size)
                return bytes(file.read(LARGEST))

        return self._with_files(get, what, size)

    def check_files(self) -> None:
        """See Connector.check_files."""
        self._with_files(lambda _: None, f"{self.name} opened no SFTP session", 0)

    def close(self) -> None:
        """See Connector.close."""
        with self._lock:
            self._closings += 1  # aborts a connect in progress
            connection, self._connection, self._files = self._connection, None, None
        if connection is not None:
            connection.close()

    def _connected(self) -> tuple[Connection, bool]:
        """Return the connection, and whether it is new."""
        with self._connecting:
            with self._lock:
                before, closings = self._connection, self._closings
            if before is not None:
                if before.active:
                    return before, False
                before.close()
            made = connect(self.name, self._ssh, self._options)
            with self._lock:
                if closings == self._closings:
                    self._connection, self._files = made, None
                    return made, True
        made.close()
        raise HostUnreachable(f"host {self.name}: the connection was closed", "launch again")

    def _active(self) -> bool:
        with self._lock:
            return self._connection is not None and self._connection.active

    def _open_session(self, limit: float) -> Session:
        connection, fresh = self._connected()
        try:
            return connection.open_session(min(limit, _BEGIN))
        except paramiko.ChannelException as error:
            raise remedies.no_session(self.name, plain(error.text)) from None
        except (paramiko.SSHException, EOFError, OSError) as error:
            if not fresh and "Timeout" not in str(error):  # it broke since its last use
                connection.close()
                return self._open_session(limit)
            raise HostUnreachable(f"host {self.name} opens no session: {first_line(error)}", "launch again") from None

    def _open_files(self, connection: Connection) -> paramiko.SFTPClient:
        try:
            return connection.open_files()
        except (paramiko.ChannelException, TimeoutError):
            raise
        except (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError) as error:  # OSError: it is closed already
            if not connection.active:
                raise
            self.run(["true"], limit=_BEGIN)  # an account that runs no commands says so
            if isinstance(error, paramiko.SFTPError):  # sftp-server, unlike internal-sftp, runs below the login shell
                hint = "let its shell's start-up files (as ~/.bashrc) print nothing where there is no terminal"
                what = "something prints before its sshd's SFTP begins"
                raise HostUnreachable(f"host {self.name} takes no files: {what}", hint) from None
            hint = "its sshd_config needs the line: Subsystem sftp internal-sftp"
            raise HostUnreachable(f"host {self.name} takes no files: its sshd has no SFTP", hint) from None

    @contextmanager
    def _session(self, limit: float) -> Iterator[Session]:
        session = self._open_session(limit)
        try:
            yield session
        finally:
            with suppress(OSError, EOFError, paramiko.SSHException):
                session.close()

    @contextmanager
    def _limit(self, limit: float, end: Callable[[], object], what: str) -> Iterator[None]:
        """Call `end` from another thread when the block exceeds `limit` seconds; the block then raises TimedOut.

        Exceptions of paramiko caused by a broken connection are converted to HostUnreachable.
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
        except (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError, HostUnreachable) as error:
            if expired.is_set():
                raise TimedOut(what, _SLOW) from None
            if isinstance(error, paramiko.ChannelException):
                raise remedies.no_session(self.name, plain(error.text)) from None
            if isinstance(error, HostUnreachable) or (isinstance(error, OSError) and self._active()):
                raise
            words = str(error).rstrip(": ")  # paramiko appends the cause after a colon; it may be empty
            raise remedies.broken(self.name, words) from None
        finally:
            timer.cancel()
        if expired.is_set():
            raise TimedOut(what, _SLOW)

    def _with_files(self, do: Callable[[paramiko.SFTPClient], _Result], what: str, size: int) -> _Result:
        limit = _FILES + size / _SLOWEST
        with self._files_lock:
            connection = self._connected()[0]
            with self._limit(limit, connection.close, f"{what} within {limit:g} s"):
                if self._files is None:
                    self._files = self._open_files(connection)
                files = self._files  # another thread may close the connection meanwhile
                try:
                    return do(files)
                except (paramiko.SSHException, paramiko.SFTPError, EOFError, OSError) as error:
                    # Its session may break before the connection. Other errors are of the file.
                    of_the_file = isinstance(error, OSError) and not isinstance(error, ConnectionError)
                    if of_the_file and not files.get_channel().closed:
                        raise
                    self._files = None
                    with suppress(OSError, EOFError, paramiko.SSHException):
                        files.close()
                    raise EOFError(str(error)) from None


def _make_folders(files: paramiko.SFTPClient, folder: PurePosixPath) -> None:
    try:
        _make_folder(files, folder)
    except FileNotFoundError:
        _make_folders(files, folder.parent)
        _make_folder(files, folder)


def _make_folder(files: paramiko.SFTPClient, folder: PurePosixPath) -> None:
    """Make it unless it exists: hosts of one machine make the same folders at the same time."""
    try:
        files.mkdir(str(folder), 0o700)
    except FileNotFoundError:
        raise
    except OSError:  # SFTP has no error code for "exists"
        if not stat.S_ISDIR(files.stat(str(folder)).st_mode or 0):
            raise
