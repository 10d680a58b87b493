"""Verification of host keys against a fingerprint or known_hosts."""

import base64
import fnmatch
import hashlib
import hmac
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko

from geomx_cli.core.files import make_folders
from geomx_cli.hosts.ssh import remedies
from geomx_cli.hosts.ssh.credentials import Hop
from geomx_cli.hosts.ssh.options import SshOptions

__all__ = ["CERTIFICATE_TYPES", "HostCertificate", "check_host_key", "key_at", "known_types", "make_ready"]

# Certificates of host keys, signed by an authority that known_hosts names (PROTOCOL.certkeys of OpenSSH).

_SUFFIX = "-cert-v01@openssh.com"
CERTIFICATE_TYPES = tuple(
    kind + _SUFFIX
    for kind in (
        "ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "rsa-sha2-512",
        "rsa-sha2-256",
    )
)  # fmt: skip
_KEY_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2}  # of an ECDSA key: curve and point
_OF_HOST = 2


@dataclass(frozen=True)
class HostCertificate:
    """A host's certificate: who signed it, for which names, and from when until when (Unix seconds)."""

    authority: bytes
    kind: int
    principals: tuple[str, ...]
    after: int
    before: int
    critical: bytes
    signed: bytes
    signature: bytes

    @classmethod
    def of(cls, key: Any) -> "HostCertificate | None":
        """The certificate that came with a host key (paramiko PKey); None for a plain key, or a malformed one."""
        if key.public_blob is None:
            return None
        data = key.public_blob.key_blob
        message = paramiko.Message(data)
        try:
            plain = message.get_text().removesuffix(_SUFFIX)
            for _ in range(1 + _KEY_FIELDS.get(plain, 2)):  # the nonce first
                message.get_string()
            message.get_int64()
            kind = message.get_int()
            message.get_string()
            listed, names = paramiko.Message(message.get_string()), list[str]()
            while listed.get_remainder():
                names.append(listed.get_text())
            after, before, critical = message.get_int64(), message.get_int64(), message.get_string()
            message.get_string()
            message.get_string()
            authority = message.get_string()
            signed = data[: len(data) - len(message.get_remainder())]
            return cls(authority, kind, tuple(names), after, before, critical, signed, message.get_string())
        except Exception:  # paramiko raises various exceptions for what is cut or no text
            return None

    def problem(self, name: str) -> str:
        """Why it does not vouch for the host called `name`, as a clause; "" if it does."""
        now = time.time()
        if self.kind != _OF_HOST:
            return "is one of a user"
        if not self.after <= now < self.before:
            return "has expired" if now >= self.before else "is not valid yet"
        if self.principals and not any(fnmatch.fnmatchcase(name, one.lower()) for one in self.principals):
            return f"is for {', '.join(self.principals)}"
        if self.critical:
            return "has options that geomx does not know"
        try:
            authority = paramiko.PKey.from_type_string(paramiko.Message(self.authority).get_text(), self.authority)
            right = authority.verify_ssh_sig(self.signed, paramiko.Message(self.signature))
        except Exception:  # paramiko raises various exceptions for malformed keys and signatures
            right = False
        return "" if right else "has a wrong signature"


_AUTHORITY = "@cert-authority"
_appending = threading.Lock()  # several hosts may be accepted concurrently


@dataclass(frozen=True)
class _Known:
    """One line of a known_hosts file."""

    place: str
    marker: str
    names: str
    key_type: str
    key: bytes

    def __str__(self) -> str:
        digest = base64.b64encode(hashlib.sha256(self.key).digest()).decode().rstrip("=")
        return f"{self.key_type} SHA256:{digest}"


def key_at(place: str) -> str:
    """Return type and fingerprint of the key at a file's line, as "/path:3"; "" if there is none."""
    found = (str(entry) for entry in _read(Path(place.rpartition(":")[0])) if entry.place == place)
    return next(found, "")


def known_types(hop: Hop) -> list[str]:
    """Return the types of the host keys known for `hop`, to request them. If a certificate authority is known for
    `hop`, types of certificates come first.
    """
    own, portless = _entries(hop)
    certified = any(entry.marker == _AUTHORITY for entry in (*own, *portless))
    plain = [entry.key_type for entry in own or portless if not entry.marker]
    return [*(CERTIFICATE_TYPES if certified else ()), *plain]


def check_host_key(hop: Hop, key: Any, options: SshOptions) -> None:
    """Verify the host key (paramiko PKey) of `hop`. Raises HostUnreachable if it is unknown, WrongHostKey on a
    mismatch.

    A fingerprint in the inventory overrides known_hosts. Otherwise an unknown key is accepted, and appended to
    known_hosts, only with `accept_new_host_keys`; a changed or revoked key never is.
    """
    shown = f"{key.get_name()} {key.fingerprint}"
    if hop.fingerprint:
        if not hmac.compare_digest(hop.fingerprint.rstrip("="), key.fingerprint):
            raise remedies.wrong_fingerprint(hop, shown)
        return
    own, portless = _entries(hop)
    certificate = HostCertificate.of(key)
    signed_by = certificate.authority if certificate is not None else b""
    for entry in (*own, *portless):
        if entry.marker == "@revoked" and entry.key in (key.asbytes(), signed_by):
            raise remedies.revoked_host_key(hop, shown, entry.place)
    authority = next((one for one in (*own, *portless) if (one.marker, one.key) == (_AUTHORITY, signed_by)), None)
    if certificate is not None and authority is not None:
        if problem := certificate.problem(_name_of(hop)):
            raise remedies.wrong_certificate(hop, authority.place, problem)
        return
    if any(entry.key == key.asbytes() for entry in (*own, *portless) if not entry.marker):
        return
    known = [entry for entry in own if not entry.marker]
    if known:
        raise remedies.changed_host_key(hop, shown, known[0].place, str(known[0]))
    if not options.accept_new_host_keys:
        raise remedies.unknown_host_key(hop, shown)
    _append(hop, f"{hop.trusted_as} {key.get_name()} {key.get_base64()}")
    options.notify(f"accepted the new host key of {hop}: {shown}; it is in {hop.known_hosts[0]} now")


def _name_of(hop: Hop) -> str:
    """The name for which a certificate must be: without the port."""
    port = f"]:{hop.port}"
    return hop.trusted_as[1 : -len(port)] if hop.trusted_as.endswith(port) else hop.trusted_as


def make_ready(path: Path) -> None:
    """Make the folder of a file that OpenSSH's client is to append keys to, and end its last line: ssh does neither.
    """
    with _appending, suppress(OSError):  # ssh says what is wrong with it
        make_folders(path.parent)
        text = path.read_bytes()
        if text and not text.endswith(b"\n"):
            with path.open("ab") as file:
                file.write(b"\n")


def _append(hop: Hop, line: str) -> None:
    path = Path(hop.known_hosts[0])
    try:
        with _appending:
            make_folders(path.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "r+") as file:
                before = file.read()
                if line not in before.splitlines():
                    file.write(("" if before.endswith("\n") or not before else "\n") + line + "\n")
    except (OSError, ValueError) as error:
        raise remedies.not_added(hop, path, error) from None


def _entries(hop: Hop) -> tuple[list[_Known], list[_Known]]:
    """Return the entries for this machine, and those for its name without the port. The latter may belong to another
    sshd, so they can confirm a key but not reject it.
    """
    everything = [entry for path in hop.known_hosts for entry in _read(Path(path))]
    own = [entry for entry in everything if _matches(entry.names, hop.trusted_as)]
    if hop.port == 22:
        return own, []
    return own, [entry for entry in everything if _matches(entry.names, hop.address.lower())]


def _read(path: Path) -> Iterator[_Known]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return
    for number, line in enumerate(lines, 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        try:
            names, key_type, text = fields[:3]
            yield _Known(f"{path}:{number}", marker, names, key_type, base64.b64decode(text))
        except ValueError:
            continue


def _matches(names: str, name: str) -> bool:
    if names.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part) for part in names[3:].split("|"))
        except ValueError:
            return False
        return hmac.compare_digest(hmac.digest(salt, name.encode(), "sha1"), digest)
    patterns = [part.lower().replace("[", "[[]") for part in names.split(",")]
    if any(part.startswith("!") and fnmatch.fnmatchcase(name, part[1:]) for part in patterns):
        return False
    return any(fnmatch.fnmatchcase(name, part) for part in patterns)
