"""Resolves addresses and users of SSH hosts: the inventory takes precedence over the user's ssh_config."""

import getpass
import hashlib
import os
import re
import secrets
import shlex
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import paramiko

from geomx_cli.agent import processes
from geomx_cli.core.errors import HostUnreachable, InvalidSettings
from geomx_cli.hosts.ssh.credentials import Hop
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Ssh

__all__ = ["SYSTEM_CONFIG", "Unsupported", "UnsupportedWay", "hop", "hops", "usual_master", "words"]

SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_MASTER = "~/.ssh/geomx-%C"
_LONGEST_MASTER = 104 - 1 - 17 - 38  # bytes of a socket's path, of its end, of what ssh adds, of %C
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_USUAL_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_DEEPEST_INCLUDE = 16
_MOST_JUMPS = 8
_EXEC = 30.0  # seconds for a command of Match exec
_KILL = 2.0  # seconds for SIGKILL to end it
_MARK = "GEOMX_MATCH_EXEC"
_CERTIFICATE = "certificate: "
_BEYOND = {
    "addressfamily": "any", "bindaddress": "", "bindinterface": "", "canonicalizehostname": "no",
    "globalknownhostsfile": _SYSTEM_KNOWN_HOSTS, "gssapiauthentication": "no", "hostbasedauthentication": "no",
    "knownhostscommand": "none", "pkcs11provider": "none", "revokedhostkeys": "none", "securitykeyprovider": "internal",
}  # fmt: skip
"""Keywords that paramiko does not follow, and the value that asks for nothing."""
_OF_DISTRIBUTIONS = ("gssapiauthentication",)  # set for all hosts in their ssh_config, whether anybody uses it or not
_SECURITY_KEY = "sk-"


class Unsupported(InvalidSettings):
    """An ssh_config that OpenSSH's client may understand, and paramiko does not."""


class UnsupportedWay(HostUnreachable):
    """A host that ssh_config reaches by what paramiko cannot do."""


def hops(ssh: Ssh, options: SshOptions) -> list[Hop]:
    """Return the machines to connect through, in order; the last is the target of `ssh`.

    Raises InvalidSettings for an ssh_config that is unreadable; Unsupported and UnsupportedWay.
    """
    return [*_through(ssh, options, 0), hop(ssh, options)]


def _through(ssh: Ssh, options: SshOptions, depth: int) -> list[Hop]:
    if depth > _MOST_JUMPS:
        raise InvalidSettings(f"the jumps on the way to {ssh.address} have no end", "correct ProxyJump there")
    found = _lookup(options, ssh.address)
    jump = ssh.jump or found.get("proxyjump", "")
    if jump == "none" or (not jump and (found.get("proxycommand") or "none") == "none"):
        return []
    if not jump:
        raise UnsupportedWay(
            f"{options.config} has a ProxyCommand for {ssh.address}, which is not supported by paramiko",
            "install OpenSSH's client, and let client in [ssh] of the inventory be auto, or use ProxyJump there, or"
            " jump of the inventory",
        )
    first, *others = [_parse(part) for part in jump.split(",")]
    # The ssh_config entries for reaching the first jump host apply too.
    before = _through(first, options, depth + 1)
    return [*before, *(hop(part, options, ssh.key) for part in (first, *others))]


def _parse(text: str) -> Ssh:
    """Parse [user@]host[:port] or ssh://...; an IPv6 address with a port must be in brackets."""
    user, _, place = text.strip().removeprefix("ssh://").rstrip("/").rpartition("@")
    host, colon, port = place.rpartition(":")
    if not colon or (":" in host and not host.startswith("[")):
        host, port = place, ""
    if not host.strip("[]") or (port and not _is_port(port)):
        raise InvalidSettings(f"{text!r} is no machine to jump over", "write user@host:port, a port from 1 to 65535")
    return Ssh(address=host.strip("[]"), port=int(port or 0), user=user)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) < 65536


def hop(ssh: Ssh, options: SshOptions, key: str = "") -> Hop:
    """Resolve one machine. `key`: default key file; for a jump host, the key file of the host behind it. Raises
    InvalidSettings.
    """
    found = _lookup(options, ssh.address)
    address = found.get("hostname", ssh.address)
    configured = str(found.get("port", 22))
    if not ssh.port and not _is_port(configured):
        what = f"{options.config} has Port {configured} for {ssh.address}, which is no port"
        raise InvalidSettings(what, "correct it there")
    port = ssh.port or int(configured)
    user = ssh.user or found.get("user", "") or getpass.getuser()
    alias = found.get("hostkeyalias", "")
    jump = ssh.jump or found.get("proxyjump", "")
    tokens = {
        "%": "%", "d": str(Path.home()), "h": address, "i": str(os.getuid()), "k": alias or ssh.address,
        "l": socket.gethostname(), "L": socket.gethostname().partition(".")[0], "n": ssh.address, "p": str(port),
        "r": user, "u": getpass.getuser(), "j": "" if jump == "none" else jump,
    }  # fmt: skip
    tokens["C"] = _hash(tokens, "lhprj")

    def expanded(keyword: str, texts: Sequence[str]) -> list[str]:
        where = f"{keyword} for {ssh.address} in {options.config}"
        return [_expanded(text, tokens, where) for text in texts if text.lower() != "none"]

    agent = found.get("identityagent", "")
    if agent and agent.lower() != "none":
        agent = "" if agent == "SSH_AUTH_SOCK" else _expanded(agent, tokens, f"identityagent in {options.config}")
    listed = found.get("identityfile", [])
    files = [] if ssh.key else expanded("identityfile", [one for one in listed if not one.startswith(_CERTIFICATE)])
    # ssh skips files that do not exist; of a key in the agent the public part is enough
    there = [path for path in files if os.path.exists(path) or os.path.exists(f"{path}.pub")]  # noqa: PTH110
    marked = [one.removeprefix(_CERTIFICATE) for one in listed if one.startswith(_CERTIFICATE)]
    certificates = expanded("certificatefile", marked)
    known = words(found.get("userknownhostsfile", ""), options.config) or [options.known_hosts]
    named = [os.path.expanduser(path) for path in (ssh.key, "" if files else key) if path][:1] or there  # noqa: PTH111
    beyond = [name for name, harmless in _BEYOND.items() if str(found.get(name, harmless)).lower() != harmless]
    if any(_public_type(path).startswith(_SECURITY_KEY) for path in there):
        beyond.append("identityfile of a security key")
    usual = [] if files else [str(path) for name in _USUAL_KEYS if (path := Path("~/.ssh", name).expanduser()).exists()]
    return Hop(
        address=address,
        port=port,
        user=user,
        keys=tuple(named or usual),
        named=bool(named),
        alone=bool(named) or str(found.get("identitiesonly", "")).lower() == "yes",
        known_hosts=(*expanded("userknownhostsfile", known), _SYSTEM_KNOWN_HOSTS),
        trusted_as=alias or (address.lower() if port == 22 else f"[{address.lower()}]:{port}"),
        fingerprint=ssh.fingerprint,
        agent=agent,
        certificates=tuple(path for path in certificates if os.path.exists(path)),  # noqa: PTH110
        absent=tuple(path for path in (*files, *certificates) if path not in there and not os.path.exists(path)),  # noqa: PTH110
        master=_master(found.get("controlpath", usual_master()), tokens),
        beyond=tuple(beyond),
    )


def usual_master() -> str:
    """Return the ControlPath of a connection that a user opens for geomx, if ssh_config names none.

    It is "none" if the path of the home is too long.
    """
    path = os.path.expanduser(_MASTER)  # noqa: PTH111 - stays text
    return path if len(os.fsencode(path)) <= _LONGEST_MASTER else "none"


def _master(text: str, tokens: Mapping[str, str]) -> str:
    """Return the path of ControlPath; "" if there is none. Of two, that which exists."""
    paths: list[str] = []
    for parts in ("lhprj", "lhpr"):  # without the jumps before OpenSSH 9.6
        with suppress(InvalidSettings):  # its tokens are not needed otherwise
            paths.append(_expanded(text, {**tokens, "C": _hash(tokens, parts)}, "controlpath"))
    if text.lower() == "none" or not paths:
        return ""
    return next(filter(os.path.exists, paths), paths[-1])


def _hash(tokens: Mapping[str, str], parts: str) -> str:
    return hashlib.sha1("".join(tokens[name] for name in parts).encode(), usedforsecurity=False).hexdigest()


def _public_type(path: str) -> str:
    """The type of a key by the public part beside it; "" if that is not there."""
    with suppress(OSError, ValueError):
        return Path(path if path.endswith(".pub") else f"{path}.pub").read_text()[:64]
    return ""


def words(text: str, path: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InvalidSettings(f"{path} cannot be read: {error} in {text!r}", "correct it") from None


def _expanded(text: str, tokens: Mapping[str, str], where: str) -> str:
    """Replace ~, ${VARIABLE} and %-tokens in a path of ssh_config. Raises InvalidSettings for those that are not known.
    """

    def variable(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in os.environ:
            raise InvalidSettings(f"{where} has ${{{name}}}, which is not set", f"set {name}, or correct it there")
        return os.environ[name]

    def token(match: re.Match[str]) -> str:
        if match[1] not in tokens:
            raise Unsupported(f"{where} has the token %{match[1]}, which is not supported", "write it out there")
        return tokens[match[1]]

    text = re.sub(r"\$\{(\w+)\}|^\$(\w+)$", variable, text)
    return os.path.expanduser(re.sub("%(.)", token, text))  # noqa: PTH111 - stays text


def _lookup(options: SshOptions, name: str) -> dict[str, Any]:
    with options.lock:
        if name not in options.lookups:
            config = _read_config(options.config)
            try:
                options.lookups[name] = dict(config.lookup(name))
            except TimeoutError as error:
                raise InvalidSettings(f"ssh_config cannot be used for {name}: {error}", "correct it there") from None
            except Exception as error:  # paramiko raises various exceptions for failed expansions
                raise Unsupported(f"ssh_config cannot be used for {name}: {error}", "correct it there") from None
        return options.lookups[name]


class _Config(paramiko.SSHConfig):  # type: ignore[misc]
    """Runs each command of Match exec once, and without stdin: paramiko's own would run twice in each lookup."""

    # Tokens of paths are ours: paramiko replaces each ~ and %%h, too.
    TOKENS_BY_CONFIG_KEY: ClassVar = {
        key: tokens
        for key, tokens in paramiko.SSHConfig.TOKENS_BY_CONFIG_KEY.items()
        if key not in ("identityfile", "controlpath")
    }

    def __init__(self) -> None:
        super().__init__()
        self._passed: dict[tuple[str, str], bool] = {}

    def _does_match(self, match_list: list[Any], target_hostname: str, *others: Any) -> Any:
        before: list[Any] = []
        for each in match_list:
            if each["type"] != "exec":
                before.append(each)
            elif before and not super()._does_match(before, target_hostname, *others):
                return False
            else:
                known = (target_hostname, each["param"])
                if known not in self._passed:
                    command = self._tokenize(others[-1], target_hostname, "match-exec", each["param"])
                    self._passed[known] = _succeeds(command)
                if self._should_fail(self._passed[known], each):
                    return False
        return super()._does_match(before, target_hostname, *others) if before else match_list


def _succeeds(command: str) -> bool:
    """Whether a command of the user's own ssh_config succeeds. It is for a shell, as ssh_config(5) says.

    After the limit, or an interrupt, it is killed with all that it has started, which a variable marks. The shell stays
    in this process's group, as ssh's does, so Ctrl-C reaches it also where another thread waits for it.
    """
    nothing, mark = subprocess.DEVNULL, {_MARK: secrets.token_hex(8)}
    shell = subprocess.Popen(command, shell=True, stdin=nothing, stdout=nothing, env={**os.environ, **mark})
    try:
        return shell.wait(_EXEC) == 0
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"the command {command!r} of Match exec does not end within {_EXEC:g} s") from None
    finally:
        if shell.returncode is None:
            processes.kill_all(lambda: processes.marked(mark), _KILL)
            with suppress(subprocess.TimeoutExpired):
                shell.wait(_KILL)


def _read_config(path: str) -> paramiko.SSHConfig:
    lines = [*_lines(Path(path).expanduser()), "Host *", *_lines(Path(SYSTEM_CONFIG), of_system=True)]
    try:
        return _Config.from_text("\n".join(lines))
    except paramiko.ConfigParseError as error:
        raise Unsupported(f"{path} cannot be read: {error}", "correct it") from None


def _lines(path: Path, scope: str = "Host *", depth: int = 0, *, of_system: bool = False) -> Iterator[str]:
    """Yield the lines of a file and of its includes; none if the file is missing.

    `scope` is the Host or Match line in effect at the include; it is restored after each Include.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"{path} cannot be read: {error}", "correct it") from None
    for line in text.splitlines():
        match = re.match(paramiko.SSHConfig.SETTINGS_REGEX, line.strip())
        word, rest = (match[1].lower(), match[2]) if match is not None else ("", "")
        if word == "include" and depth < _DEEPEST_INCLUDE:
            for found in _included(path, rest.split()):
                yield from _lines(found, scope, depth + 1, of_system=of_system)
            yield scope
            continue
        if of_system and word in _OF_DISTRIBUTIONS:
            continue
        if word in ("host", "match"):
            scope = line
        # paramiko keeps several values of IdentityFile only
        unquoted = rest.strip('"')
        yield f"IdentityFile {_CERTIFICATE}{unquoted}" if word == "certificatefile" else line


def _included(path: Path, patterns: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        whole = path.parent / Path(pattern.strip('"')).expanduser()
        found += sorted(Path(whole.anchor).glob(str(whole.relative_to(whole.anchor))))
    return found
