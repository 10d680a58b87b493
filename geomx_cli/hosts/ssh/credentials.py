"""Login keys from files and from a running ssh-agent. Secrets stay in memory."""

import base64
import copy
import getpass
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import HostUnreachable
from geomx_cli.core.units import counted

__all__ = ["Hop", "Credential", "Credentials"]


@dataclass(frozen=True)
class Hop:
    """One machine on the route to a host; the last one is the host itself.

    keys: private key files.
    named: they are configured explicitly.
    alone: the agent's other keys are not tried, because keys are named or ssh_config says IdentitiesOnly.
    known_hosts: the host key files; accepted keys are appended to the first.
    trusted_as: its name in them.
    agent: the socket of the ssh-agent to use; "" for the environment's agent, "none" for none.
    certificates: files for any of the keys.
    absent: files that ssh_config names and that do not exist.
    master: the socket of a connection of the user's own that geomx would share; "" if its path is not known.
    beyond: keywords of ssh_config for this machine that only OpenSSH's client follows.
    """

    address: str
    port: int
    user: str
    keys: tuple[str, ...]
    named: bool
    alone: bool
    known_hosts: tuple[str, ...]
    trusted_as: str
    fingerprint: str = ""
    agent: str = ""
    certificates: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    master: str = ""
    beyond: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.user}@{self.address} port {self.port}"

_TRIES = 3
_MAGIC = b"openssh-key-v1\0"


@dataclass(frozen=True)
class Credential:
    """A key (paramiko PKey) and its name for messages."""

    name: str
    key: Any


class Credentials:
    """Reads each key file and prompts for each passphrase once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[str, Any] = {}

    def of(self, hop: Hop, agent: Sequence[Any] | None) -> tuple[list[Credential], list[str]]:
        """Return the keys to try for `hop`, in order, and why others that ssh_config names are left out, as clauses.
        `agent`: the keys of the ssh-agent; None: it does not answer.

        A file whose key the agent holds is not opened. A passphrase is requested only for a configured file, or if
        there is no other key. As in ssh, a file that cannot be used, or a passphrase that nobody can be asked for, is
        left out. Raises HostUnreachable for the first of them if no key is left.
        """
        held = {bytes(key.asbytes()): key for key in agent or ()}
        found: list[Credential] = []
        certified: list[Credential] = []
        locked: list[str] = []
        errors: list[HostUnreachable] = []
        for path in hop.keys:
            with _noted(errors):
                key = held.pop(_public_part(path), None) or self._load(path, ask=False)
                if key is not None:
                    found.append(Credential(path, key))
                else:
                    locked.append(path)
        if not hop.alone:
            found += [Credential(f"{key.comment or 'a key'} of the ssh-agent", key) for key in held.values()]
        for path in locked if hop.named or not found else ():
            with _noted(errors):
                found.append(Credential(path, self._load(path, ask=True)))
        for path in hop.certificates:
            with _noted(errors):
                certified += filter(None, [_certified(each, path) for each in found])
        if errors and not found:
            raise errors[0]
        left_out = [f"~/.ssh/config names {path}, which does not exist" for path in hop.absent]
        if hop.alone and not hop.named and held:
            whose = f"{counted(len(held), 'key')} of the ssh-agent"
            left_out.append(f"{whose} left out, as ~/.ssh/config says IdentitiesOnly")
        left_out += [f"no ssh-agent answers at {hop.agent}, which ~/.ssh/config names"] * (agent is None)
        return [*certified, *found], [*left_out, *(error.message for error in errors)]

    def _load(self, path: str, *, ask: bool) -> Any:
        """Load a key; None if it has a passphrase and `ask` is False."""
        with self._lock:
            if path not in self._loaded:
                key = next(iter(_unlocked(path, _answers(path, ask=ask))), None)
                if key is None:
                    if ask:
                        raise HostUnreachable(f"the passphrase of {path} is wrong", f"try again, or: ssh-add {path}")
                    return None
                self._loaded[path] = key
            return self._loaded[path]


@contextmanager
def _noted(errors: list[HostUnreachable]) -> Iterator[None]:
    try:
        yield
    except HostUnreachable as error:
        errors.append(error)


def _answers(path: str, *, ask: bool) -> Iterator[str | None]:
    """Yield None (no passphrase), then the user's inputs."""
    yield None
    if not ask:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        what = f"the key {path} has a passphrase, and there is no terminal to ask for it"
        raise HostUnreachable(what, f"unlock it first: ssh-add {path}")
    for _ in range(_TRIES):
        yield getpass.getpass(f"passphrase of {path}: ")


def _unlocked(path: str, answers: Iterator[str | None]) -> Iterator[Any]:
    """Yield the key for each passphrase that unlocks it."""
    import paramiko

    for passphrase in answers:
        try:
            yield paramiko.PKey.from_path(path, passphrase.encode() if passphrase is not None else None)
        except (TypeError, paramiko.PasswordRequiredException):
            continue
        except (OSError, ValueError, paramiko.SSHException, paramiko.pkey.UnknownKeyType) as error:
            if passphrase is None:
                if path.endswith(".pub"):
                    raise HostUnreachable(f"{path} is a public key", f"name the private one: {path[:-4]}") from None
                hint = "name a private key of type ed25519, ecdsa or rsa"
                raise HostUnreachable(f"the key {path} cannot be used: {error}", hint) from None


def _certified(credential: Credential, path: str) -> Credential | None:
    """Return the key with the certificate at `path`; None if that is of another key."""
    import paramiko

    key = credential.key
    try:
        certificate = paramiko.Message(base64.b64decode(Path(path).read_text().split()[1]))
        plain = paramiko.Message(key.asbytes())
        for field in (certificate, certificate, plain):  # its type and nonce; the key's type
            field.get_string()
        if not certificate.get_remainder().startswith(plain.get_remainder()):
            return None
        # Another object: the key may have several certificates, and is tried without one too.
        if isinstance(key, paramiko.AgentKey):
            key = paramiko.AgentKey(key.agent, key.blob, key.comment)
        else:
            key = copy.copy(key)
        key.load_certificate(path)
    except (OSError, ValueError, IndexError, paramiko.SSHException) as error:
        raise HostUnreachable(f"the certificate {path} cannot be used: {error}", "correct CertificateFile") from None
    return Credential(f"{credential.name} with {path}", key)


def _public_part(path: str) -> bytes:
    """Return the public key beside a key file, or in it, where no passphrase protects it; b"" if there is none."""
    import paramiko

    public = path if path.endswith(".pub") else f"{path}.pub"  # ssh_config may name the public part of an agent's key
    with suppress(OSError, ValueError, IndexError):
        return base64.b64decode(Path(public).read_text().split()[1])
    with suppress(OSError, ValueError):
        lines = [line for line in Path(path).read_text().splitlines() if not line.startswith("-----")]
        body = base64.b64decode("".join(lines))
        if body.startswith(_MAGIC):  # PROTOCOL.key of OpenSSH: cipher, its key's derivation and options, number of keys
            fields = paramiko.Message(body[len(_MAGIC) :])
            for _ in range(3):
                fields.get_string()
            return bytes(fields.get_string()) if fields.get_int() == 1 else b""
    return b""
