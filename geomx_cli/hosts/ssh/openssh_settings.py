"""Settings of OpenSSH's client: what geomx demands of it, and what it makes of the user's ssh_config.

geomx writes a file that includes the user's: ssh takes the first value of a keyword, and passes only a file (no -o) on
to the ssh that connects to a jump host.
"""

import getpass
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from geomx_cli.core.errors import InvalidSettings, TimedOut
from geomx_cli.core.files import is_own_socket
from geomx_cli.core.untrusted import plain
from geomx_cli.hosts.ssh.config import SYSTEM_CONFIG, usual_master, words
from geomx_cli.hosts.ssh.credentials import Hop
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.hosts.ssh.remedies import TCP
from geomx_cli.inventory import Ssh

__all__ = ["Settings", "environment", "is_open", "program", "resolved", "run"]

_RESOLVE = 40.0  # seconds: a command of Match exec may take 30
_CHECK = 5.0
_FORCED = f"""\
Host *
  BatchMode yes
  StrictHostKeyChecking %s
  UpdateHostKeys no
  FingerprintHash sha256
  VerifyHostKeyDNS no
  NoHostAuthenticationForLocalhost no
  ConnectTimeout {TCP:g}
  ConnectionAttempts 1
  ControlMaster no
  ControlPersist no
  ClearAllForwardings yes
  ForwardAgent no
  ForwardX11 no
  PermitLocalCommand no
  RemoteCommand none
  RequestTTY no
  Tunnel no
"""
_NEWER = {"sessiontype": "default", "stdinnull": "no", "forkafterauthentication": "no"}  # of OpenSSH 8.7
_KEY_EXCHANGE = "GSSAPIKeyExchange"  # of distributions: with it, ssh checks no host key
_OF_SHELLS = frozenset("'`\"$;&<>|(){}")  # ssh runs a ProxyCommand, also that for a jump host, by a shell


@dataclass(frozen=True)
class Settings:
    """How ssh connects to a host.

    address: what it is called with, as the inventory says; an alias maybe. arguments: before that. indirect: whether it
    connects through another program, or a jump host.
    """

    hop: Hop
    address: str
    arguments: tuple[str, ...]
    indirect: bool


def program() -> str:
    """Return the path of ssh. Raises InvalidSettings if it is not installed."""
    found = shutil.which("ssh")
    if found is None:
        raise InvalidSettings(
            "the program ssh is not installed on this machine",
            "install OpenSSH's client (Debian, Ubuntu: apt install openssh-client; Fedora: dnf install"
            ' openssh-clients), or write client = "paramiko" in [ssh] of the inventory',
        )
    return found


def environment() -> Mapping[str, str]:
    """The environment of ssh: nothing asks for a secret in a window."""
    return {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}


def resolved(ssh: Ssh, options: SshOptions, place: Path) -> Settings:
    """Write the settings into the folder `place`, and return them as ssh resolves them. Raises InvalidSettings for an
    ssh_config that ssh refuses, TimedOut if a command in it does not end.
    """
    for text in (ssh.address, ssh.user, *ssh.jump.split(",")):
        if text.startswith("-") or any(
            letter.isspace() or not letter.isprintable() or letter in _OF_SHELLS for letter in text
        ):
            raise InvalidSettings(f"{text!r} is no name of a machine or an account", "correct it in the inventory")
    file = place / "config"
    file.write_text(text := _text(ssh, options))
    arguments = _arguments(ssh, file)
    with options.lock:
        found = options.resolved.get(ssh)
    if found is None:
        found = _asked(arguments, ssh.address)
        with options.lock:
            options.resolved[ssh] = found
    if _KEY_EXCHANGE.lower() in found:  # in the file, as jump hosts get no -o
        file.write_text(f"Host *\n  {_KEY_EXCHANGE} no\n{text}")
    newer = [f"-o{keyword}={usual}" for keyword, usual in _NEWER.items() if keyword in found]
    if ssh.fingerprint and "knownhostscommand" in found:  # its keys would be trusted, too
        newer.append("-oKnownHostsCommand=none")
    indirect = any(found.get(keyword, ["none"]) != ["none"] for keyword in ("proxyjump", "proxycommand"))
    return Settings(_hop(ssh, options, found), ssh.address, (*arguments, *newer), indirect)


def is_open(socket: str, options: SshOptions) -> bool:
    """Whether a connection of this user that others may share listens at this path.

    It is not used where another user could listen in its place: that user would get all commands and files.
    """
    if not socket or not os.path.exists(socket):  # noqa: PTH110 - stays text
        return False
    if not is_own_socket(Path(socket)):
        what = f"geomx does not share the connection at {socket}"
        options.notify_once(what, f"{what}: another account could listen there instead")
        return False
    command = [program(), "-F", "none", "-S", socket, "-O", "check", "--", "master"]
    try:
        return run(command, _CHECK).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def run(command: Sequence[str], limit: float) -> "subprocess.CompletedProcess[str]":
    """Run ssh to its end. After the limit it is killed with what it has started."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace", env=environment(),
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            out, err = process.communicate(timeout=limit)
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _text(ssh: Ssh, options: SshOptions) -> str:
    strict = "accept-new" if options.accept_new_host_keys else "yes"
    after = [f"ControlPath {_quoted(usual_master())}", f"UserKnownHostsFile {_literal(options.known_hosts)}"]
    if ssh.key:  # also for the jump hosts that have none
        after.append(f"IdentityFile {_literal(ssh.key)}")
    parts = [_FORCED % strict]
    for path in (options.config, SYSTEM_CONFIG):
        if Path(path).expanduser().is_file():
            parts += [f"Include {_quoted(_absolute(path))}", "Match all"]
    return "\n".join([*parts, *after, ""])


def _arguments(ssh: Ssh, file: Path) -> tuple[str, ...]:
    found = ["-F", str(file)]
    if ssh.port:
        found += ["-p", str(ssh.port)]
    if ssh.user:
        found += ["-l", ssh.user]
    if ssh.jump:
        found += ["-o", f"ProxyJump={ssh.jump}"]
    if ssh.key:
        found += ["-o", f"IdentityFile={_literal(ssh.key)}", "-o", "IdentitiesOnly=yes"]
    return tuple(found)


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))  # noqa: PTH100, PTH111 - stays text


def _literal(path: str) -> str:
    return _quoted(_absolute(path).replace("%", "%%"))


def _quoted(path: str) -> str:
    if '"' in path or "\n" in path:
        raise InvalidSettings(f"ssh takes no path with a quotation mark: {path!r}", "rename it")
    return f'"{path}"'


def _asked(arguments: Sequence[str], address: str) -> dict[str, list[str]]:
    """Return what `ssh -G` prints: the values of each keyword."""
    try:
        done = run([program(), "-G", *arguments, "--", address], _RESOLVE)
    except subprocess.TimeoutExpired:
        what = f"`ssh -G {address}` did not end within {_RESOLVE:g} s"
        raise TimedOut(what, "see which command of Match exec in ~/.ssh/config does not end") from None
    if done.returncode:
        why = next(iter(plain(done.stderr).strip().splitlines()), "it says nothing")
        raise InvalidSettings(f"ssh_config cannot be used for {address}: {why}", "correct it there")
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword, []).append(value)
    return found


def _hop(ssh: Ssh, options: SshOptions, found: Mapping[str, Sequence[str]]) -> Hop:
    def value(keyword: str, usual: str = "") -> str:
        text = found.get(keyword, [usual])[0]
        return "" if text == "none" else text

    address, port = value("hostname", ssh.address), int(value("port", "22"))
    known = words(value("userknownhostsfile"), options.config)
    return Hop(
        address=address,
        port=port,
        user=value("user") or getpass.getuser(),
        keys=(ssh.key,) if ssh.key else (),
        named=bool(ssh.key),
        alone=bool(ssh.key) or value("identitiesonly") == "yes",
        known_hosts=tuple(known) or (_absolute(options.known_hosts),),
        trusted_as=value("hostkeyalias") or (address.lower() if port == 22 else f"[{address.lower()}]:{port}"),
        fingerprint=ssh.fingerprint,
        master=value("controlpath"),
    )
