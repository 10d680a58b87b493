"""Resolves addresses and users of SSH hosts: the inventory takes precedence over the user's ssh_config."""

import getpass
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.hosts.ssh.hop import Hop
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Ssh

__all__ = ["hops"]

_SYSTEM_CONFIG = "/etc/ssh/ssh_config"
_SYSTEM_KNOWN_HOSTS = "/etc/ssh/ssh_known_hosts"
_USUAL_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_DEEPEST_INCLUDE = 16
_MOST_JUMPS = 8


def hops(ssh: Ssh, options: SshOptions) -> list[Hop]:
    """Return the machines to connect through, in order; the last is the target of `ssh`.

    Raises InvalidSettings for an ssh_config that is unreadable or uses unsupported features.
    """
    config = _read_config(options.config)
    return [*_through(ssh, options, config, 0), _hop(ssh, options, config)]


def _through(ssh: Ssh, options: SshOptions, config: paramiko.SSHConfig, depth: int) -> list[Hop]:
    if depth > _MOST_JUMPS:
        raise InvalidSettings(f"the jumps on the way to {ssh.address} have no end", "correct ProxyJump there")
    found = _lookup(config, ssh.address)
    jump = ssh.jump or found.get("proxyjump", "")
    if jump == "none" or not (jump or "proxycommand" in found):
        return []
    if not jump:
        hint = "use ProxyJump there, or jump in the inventory"
        raise InvalidSettings(f"{options.config} has a ProxyCommand for {ssh.address}, which is not supported", hint)
    first, *others = [_parse(part) for part in jump.split(",")]
    # The ssh_config entries for reaching the first jump host apply too.
    before = _through(first, options, config, depth + 1)
    return [*before, *(_hop(part, options, config, ssh.key) for part in (first, *others))]


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


def _hop(ssh: Ssh, options: SshOptions, config: paramiko.SSHConfig, key: str = "") -> Hop:
    """Resolve one machine. `key`: default key file, that of the host behind this jump host."""
    found = _lookup(config, ssh.address)
    address = found.get("hostname", ssh.address)
    configured = str(found.get("port", 22))
    if not ssh.port and not _is_port(configured):
        what = f"{options.config} has Port {configured} for {ssh.address}, which is no port"
        raise InvalidSettings(what, "correct it there")
    port = ssh.port or int(configured)
    named = [ssh.key] if ssh.key else found.get("identityfile") or [key] * bool(key)
    usual = [str(path) for name in _USUAL_KEYS if (path := Path("~/.ssh", name).expanduser()).exists()]
    files = found.get("userknownhostsfile", options.known_hosts).split()
    name = found.get("hostkeyalias", "") or (address.lower() if port == 22 else f"[{address.lower()}]:{port}")
    return Hop(
        address=address,
        port=port,
        user=ssh.user or found.get("user", "") or getpass.getuser(),
        keys=tuple(os.path.expanduser(path) for path in named) or tuple(usual),  # noqa: PTH111 - stays text
        named=bool(named),
        known_hosts=tuple(os.path.expanduser(path) for path in (*files, _SYSTEM_KNOWN_HOSTS)),  # noqa: PTH111
        trusted_as=name,
        fingerprint=ssh.fingerprint,
    )


def _lookup(config: paramiko.SSHConfig, alias: str) -> dict[str, Any]:
    try:
        return dict(config.lookup(alias))
    except Exception as error:  # paramiko raises various exceptions for failed expansions
        raise InvalidSettings(f"ssh_config cannot be used for {alias}: {error}", "correct it there") from None


def _read_config(path: str) -> paramiko.SSHConfig:
    lines = [*_lines(Path(path).expanduser()), "Host *", *_lines(Path(_SYSTEM_CONFIG))]
    try:
        return paramiko.SSHConfig.from_text("\n".join(lines))
    except paramiko.ConfigParseError as error:
        raise InvalidSettings(f"{path} cannot be read: {error}", "correct it") from None


def _lines(path: Path, scope: str = "Host *", depth: int = 0) -> Iterator[str]:
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
        word, _, rest = line.strip().replace("=", " ", 1).partition(" ")
        if word.lower() == "include" and depth < _DEEPEST_INCLUDE:
            for found in _included(path, rest.split()):
                yield from _lines(found, scope, depth + 1)
            yield scope
            continue
        if word.lower() in ("host", "match"):
            scope = line
        yield line


def _included(path: Path, patterns: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for pattern in patterns:
        whole = path.parent / Path(pattern.strip('"')).expanduser()
        found += sorted(Path(whole.anchor).glob(str(whole.relative_to(whole.anchor))))
    return found
