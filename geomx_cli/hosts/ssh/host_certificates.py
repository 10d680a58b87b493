"""Certificates of host keys, signed by an authority that known_hosts names (PROTOCOL.certkeys of OpenSSH)."""

import fnmatch
import time
from dataclasses import dataclass
from typing import Any

import paramiko

__all__ = ["CERTIFICATE_TYPES", "HostCertificate"]

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
