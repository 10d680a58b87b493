"""Connections by OpenSSH's client: one master process for each host, whose connection all commands share."""

import hmac
import os
import random
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import paramiko

from geomx_cli.hosts.ssh import remedies
from geomx_cli.hosts.ssh.connection import Session
from geomx_cli.hosts.ssh.host_keys import key_at, make_ready
from geomx_cli.hosts.ssh.openssh_folder import Folder
from geomx_cli.hosts.ssh.openssh_log import TurnedAway, accepted_keys, refusal
from geomx_cli.hosts.ssh.openssh_session import OpensshSession, end_group
from geomx_cli.hosts.ssh.openssh_settings import Settings, is_open, program, resolved, run
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.hosts.ssh.streams import OwnOutput, drain, in_thread, remote_command
from geomx_cli.inventory import Ssh

__all__ = ["OpensshConnection"]

_CONNECT = 45.0  # seconds, over all jump hosts
_START = 20.0  # for the lifeline over a connection that is open: the account's start-up files run first
_BEGIN = 10.0
_END = 2.0
_ASK = 1.0
_MOST_SILENT = 4  # answers that may be missing, one after another
_ALIVE = ("-oServerAliveInterval=1", "-oServerAliveCountMax=4")
# ssh must not connect by itself where the master is gone or refuses
_SHARED = ("-F", "none", "-T", "-oBatchMode=yes", "-oProxyCommand=false", "-oLogLevel=ERROR")
_ONLY_KEY = ("-oStrictHostKeyChecking=accept-new", "-oHashKnownHosts=no", "-oPreferredAuthentications=none")
_CHUNK = 1 << 16
_MOST_LOGGED = 1 << 20


class OpensshConnection:
    """A master connection to a host: one of the user's own if ssh_config names one that is open, else one of geomx.

    If the host, a jump host or the network is lost, `active` becomes False within 5 seconds and all waits on it end.
    Its lifeline is `cat` on the host, whose stdin this process holds: without it geomx's master ends, too.
    """

    def __init__(self, host: str, ssh: Ssh, options: SshOptions) -> None:
        """Connect. Raises HostUnreachable with the host's name, the failed step and the cause."""
        self._host = host
        self._program = program()
        folder = Folder()
        self._folder = folder.path
        self._log = self._folder / "log"
        self._logging = [self._program, "-v", "-E", str(self._log)]
        self._lifelines: list[subprocess.Popen[bytes]] = []
        self._finish = weakref.finalize(self, _finish, self._lifelines, folder, os.getpid())
        self._said = bytearray()  # by the lifeline, on stderr
        self._sessions: list[OpensshSession] = []
        self._changing = threading.Lock()
        self._closed = threading.Event()
        self.heard_at = 0.0  # by the monotonic clock: when the host last sent something
        self._answers = threading.Condition()
        self._asked = self._answered = 0  # bytes over the lifeline
        self._broken = False
        try:
            self._connect(resolved(ssh, options, self._folder), options)
        except BaseException:
            self.close()
            raise

    @property
    def active(self) -> bool:
        """Whether it is not known to be broken."""
        return not (self._broken or self._closed.is_set() or self._lifelines[-1].poll() is not None)

    def ends_within(self, limit: float) -> bool:
        """Whether it is broken, or breaks within `limit` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._lifelines[-1].wait(limit)
        return not self.active

    def open_session(self, limit: float) -> Session:
        """See Connection.open_session. The session itself is opened with its command.

        After a pause the host has to answer first: ssh may not have noticed yet that the connection is broken.
        """
        if time.monotonic() - self.heard_at > _ASK:
            self._ask(limit)
        with suppress(OSError):
            if self._log.stat().st_size > _MOST_LOGGED:
                os.truncate(self._log, 0)  # it has been read; ssh appends to it
        session = OpensshSession(self, self._shared)
        with self._changing:
            if not self.active:
                raise EOFError
            over = [each for each in self._sessions if each.over]
            self._sessions = [*(each for each in self._sessions if each not in over), session]
        for each in over:
            each.close()
        return session

    def open_files(self) -> paramiko.SFTPClient:
        """See Connection.open_files."""
        session = self.open_session(_BEGIN)
        session.invoke_subsystem("sftp")
        return paramiko.SFTPClient(session)

    def close(self) -> None:
        """End geomx's master, and all sessions of a user's master."""
        self._closed.set()
        with self._changing:
            sessions, self._sessions = self._sessions, []
        self._finish()
        for session in sessions:
            session.close()

    def _connect(self, settings: Settings, options: SshOptions) -> None:
        hop = settings.hop
        if options.accept_new_host_keys:
            make_ready(Path(hop.known_hosts[0]))
        users = is_open(hop.master, options)
        place = hop.master if users else str(self._folder / "master")
        self._shared = [self._program, *_SHARED, "-S", place]
        if users and hop.fingerprint:
            what = f"geomx does not compare the fingerprint of host {self._host}"
            options.notify_once(what, f"{what}: it shares the connection that you have opened at {place}")
        end, trusted = time.monotonic() + remedies.TURNED_AWAY, list[str]()
        while True:
            try:
                if hop.fingerprint and not users and not trusted:
                    trusted = self._pinned(settings)
                master = [*self._logging, *trusted, "-M", "-S", place, *_ALIVE, *settings.arguments]
                lifeline = self._live(settings, self._shared if users else master)
                break
            except TurnedAway as away:
                if time.monotonic() > end:
                    raise remedies.at(self._host, away.error) from None
                time.sleep(random.uniform(0.1, 1.0))
        for text in accepted_keys(self._host, settings, [*self._heard(), *self._logged()]):
            options.notify(text)
        self._lifeline = lifeline
        in_thread(self._listen)
        if users:
            threading.Thread(target=self._watch, name=f"answers of {self._host}", daemon=True).start()

    def _live(self, settings: Settings, argv: Sequence[str]) -> OpensshSession:
        """Start the lifeline. Raises TurnedAway if it may be tried again."""
        session, own, late, shared = OpensshSession(self, argv), OwnOutput(), 0.0, argv is self._shared
        self._said.clear()
        self._log.unlink(missing_ok=True)
        session.start(["--", settings.address, remote_command(["cat"])])
        assert session.process is not None
        self._lifelines.append(session.process)
        self._sessions.append(session)
        listener = in_thread(lambda: drain(session.recv_stderr, self._keep))
        limit = _START if shared else _CONNECT
        end = time.monotonic() + limit
        try:
            while not own.begun and (data := session.recv_by(end, _CHUNK)):
                own.of(data)
        except TimeoutError:
            end_group(session.process)  # its streams end with it
            late = limit
        if own.begun:
            return session
        with suppress(subprocess.TimeoutExpired):
            session.process.wait(_END)
        listener.join(_END)
        raise refusal(self._host, settings, self._heard(), self._logged(), own.before, shared=shared, late=late)

    def _pinned(self, settings: Settings) -> list[str]:
        """Compare the host's key with the inventory's fingerprint, without logging in. Return the options by which ssh
        trusts this key alone.
        """
        file = self._folder / "pinned"
        trusted = ["-oUserKnownHostsFile=" + str(file), "-oGlobalKnownHostsFile=none"]
        alone = ("-S", "none", *_ONLY_KEY, *trusted)  # a connection that is open shows no key
        argv = [*self._logging, *alone, *settings.arguments, "--", settings.address, "true"]
        self._log.unlink(missing_ok=True)
        try:
            heard = run(argv, _CONNECT).stderr.splitlines()
        except subprocess.TimeoutExpired:
            raise refusal(self._host, settings, [], self._logged(), late=_CONNECT) from None
        if not file.exists():
            raise refusal(self._host, settings, heard, self._logged())
        shown = key_at(f"{file}:1")
        if not hmac.compare_digest(settings.hop.fingerprint.rstrip("="), shown.rpartition(" ")[2]):
            raise remedies.at(self._host, remedies.wrong_fingerprint(settings.hop, shown))
        return ["-oStrictHostKeyChecking=yes", *trusted]

    def _keep(self, data: bytes) -> None:
        self._said += data
        del self._said[:-_CHUNK]

    def _heard(self) -> list[str]:
        return self._said.decode(errors="replace").splitlines()

    def _logged(self) -> list[str]:
        try:
            return self._log.read_text(errors="replace").splitlines()
        except OSError:
            return []

    def _ask(self, limit: float) -> None:
        """Have the host answer. Raises SSHException if it does not in time, EOFError or OSError if the connection
        breaks.
        """
        with self._answers:
            self._asked += 1
            wanted = self._asked
        self._lifeline.send(b".")
        with self._answers:
            self._answers.wait_for(lambda: self._answered >= wanted or not self.active, limit)
            if not self.active:
                raise EOFError
            if self._answered < wanted:
                raise paramiko.SSHException("Timeout opening channel.")

    def _listen(self) -> None:
        """Count the answers until the connection breaks."""
        drain(self._lifeline.recv, self._note)
        self._broken = True
        self._note(b"")

    def _note(self, answers: bytes) -> None:
        with self._answers:
            self._answered += len(answers)
            self._answers.notify_all()

    def _watch(self) -> None:
        """Ask each second, and close after too many without an answer: a user's master may not ask by itself."""
        silent, heard_at = 0, self.heard_at
        while self.active and not self._closed.wait(_ASK):
            silent = 0 if self.heard_at > heard_at else silent + 1
            heard_at = self.heard_at
            if silent > _MOST_SILENT:
                self.close()
            with suppress(OSError), self._answers:
                self._asked += self._lifeline.send(b".")


def _finish(lifelines: Sequence["subprocess.Popen[bytes]"], folder: Folder, owner: int) -> None:
    """End these with what they have started, and remove the folder. Runs at the end of this process at the latest, and
    in no process forked from it.
    """
    if os.getpid() != owner:
        return
    for process in lifelines:
        if process.poll() is None:
            for number in (signal.SIGTERM, signal.SIGKILL):  # SIGKILL for what ssh leaves, too
                end_group(process, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END)
    folder.remove()
