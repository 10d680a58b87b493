"""Real sshd processes for tests, each with its own configuration, keys and port; each represents a machine."""

import getpass
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.hosts.ssh.connector import SshConnector
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Ssh
from geomx_cli.inventory.access import SshClient

SSHD = "/usr/sbin/sshd"


def make_key(path: Path, passphrase: str = "", kind: str = "ed25519") -> Path:
    """Create a private key, and its public part in PATH.pub."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "test", "-f", path], check=True)
    return path


@dataclass
class Person:
    """A user who logs in: a home with .ssh/id_ed25519, and contents for ssh_config and known_hosts."""

    home: Path
    client: SshClient = "paramiko"

    def __post_init__(self) -> None:
        self.key = make_key(self.home / ".ssh" / "id_ed25519")
        self.config = self.home / ".ssh" / "config"
        self.known_hosts = self.home / ".ssh" / "known_hosts"
        self.config.touch()
        self.known_hosts.touch()
        self.told: list[str] = []

    def options(self, **changes: Any) -> SshOptions:
        """Options that use only files in this home."""
        places = {"config": str(self.config), "known_hosts": str(self.known_hosts), "notify": self.told.append}
        return SshOptions(**{**places, **changes})

    def ssh(self, **fields: Any) -> Ssh:
        """Access settings, as in an inventory."""
        return Ssh(**{"client": self.client, **fields})

    def knows(self, *machines: "Sshd") -> None:
        """Add the machines' host keys to known_hosts, and their names to ssh_config."""
        with self.known_hosts.open("a") as known, self.config.open("a") as config:
            for machine in machines:
                known.write(f"[{machine.address}]:{machine.port} {machine.host_key}\n")
                place = f"HostName {machine.address}\n  Port {machine.port}\n  IdentityFile {self.key}"
                config.write(f"Host {machine.name}\n  {place}\n  UserKnownHostsFile {self.known_hosts}\n")


@dataclass
class Sshd:
    """One sshd, with its own home for users. `namespace`: the network namespace in which it listens and its sessions
    run.
    """

    folder: Path
    name: str
    person: Person
    address: str = "127.0.0.1"
    namespace: str = ""
    settings: Sequence[str] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.home = self.folder / "home"
        self.home.mkdir(parents=True, exist_ok=True)
        self.state_dir = str(self.home / ".local" / "state" / "geomx")
        self.key_file = make_key(self.folder / "host_key")
        self.log = self.folder / "sshd.log"
        self.port = self.port or _free_port(self.address)

    @property
    def host_key(self) -> str:
        """Its public host key in the format of known_hosts."""
        return " ".join(Path(f"{self.key_file}.pub").read_text().split()[:2])

    @property
    def fingerprint(self) -> str:
        """SHA256:... of its host key."""
        shown = subprocess.run(["ssh-keygen", "-lf", self.key_file], capture_output=True, text=True, check=True)
        return shown.stdout.split()[1]

    def ssh(self, **changes: Any) -> Ssh:
        """Its access settings, as in an inventory."""
        usual = {"address": self.address, "port": self.port, "user": getpass.getuser(), "key": str(self.person.key)}
        return self.person.ssh(**{**usual, **changes})

    def host(self, *, options: SshOptions | None = None, python: str = "python3", **changes: Any) -> SshConnector:
        """The machine as a host; `changes` apply to its access settings."""
        return SshConnector(self.name, self.ssh(**changes), python, options=options or self.person.options())

    def start(self) -> "Sshd":
        """Start it and wait until it listens."""
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        (self.folder / "config").write_text("\n".join(self._config()) + "\n")
        before = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        command = [*before, SSHD, "-D", "-f", str(self.folder / "config"), "-E", str(self.log)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        end = time.monotonic() + 10
        while "Server listening" not in (self.log.read_text() if self.log.exists() else ""):
            assert self.process.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.02)
        return self

    def change(self, *settings: str) -> None:
        """Give it other settings; connections that are open keep theirs."""
        assert self.process is not None
        self.settings, before = settings, self.log.read_text().count("Server listening")
        (self.folder / "config").write_text("\n".join(self._config()) + "\n")
        self.process.send_signal(signal.SIGHUP)
        while self.log.read_text().count("Server listening") == before:
            time.sleep(0.02)

    def sessions(self) -> list[int]:
        """The pids of the processes that serve connections."""
        assert self.process is not None
        return [who.pid for who in processes.descendants(self.process.pid) if _command(who.pid).startswith("sshd:")]

    def cut(self) -> None:
        """End all connections, like a network failure; the processes started over them survive."""
        for pid in self.sessions():
            _kill(pid, signal.SIGKILL)

    def vanish(self) -> None:
        """End sshd and its connections; the processes started over them survive, and `start` restores it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGSTOP)  # accepts no more connections
            self.cut()
            self.process.kill()
            self.process.wait()
            self.process = None
            self.log.unlink()

    def stop(self) -> None:
        """End it and all processes started over it, except those that have detached."""
        if self.process is not None:
            for who in processes.descendants(self.process.pid):
                _kill(who.pid, signal.SIGKILL)
            self.vanish()

    def _config(self) -> list[str]:
        return [
            *self.settings,  # the first setting of a name is used
            f"SetEnv HOME={self.home}",
            f"ListenAddress {self.address}",
            f"Port {self.port}",
            f"HostKey {self.key_file}",
            f"AuthorizedKeysFile {self.person.key}.pub",
            "PidFile none",
            "UsePAM no",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "PermitRootLogin prohibit-password",
            *([] if "sftp" in str(self.settings) else ["Subsystem sftp internal-sftp"]),
            *([] if "MaxStartups" in str(self.settings) else ["MaxStartups 200"]),  # sshd uses the last
            "LogLevel VERBOSE",
        ]


def _kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:  # the address is in another namespace, where every port is free
            return 2222
        return int(probe.getsockname()[1])
