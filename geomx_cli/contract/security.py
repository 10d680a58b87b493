"""Keys of a job, for authentication and encryption (CurveZMQ, RFC 26 and 27).

`geomx launch` generates them, one file of mode 0600 per process. All listening processes share the job's server key;
every process has its own client key. A listening process holds the client keys of the processes that dial it, with each
one's identity, and trusts nothing else about them.
"""

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from geomx_cli.core.errors import InvalidSettings

__all__ = ["Identity", "KeyRing", "generate", "load"]

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


class Identity(NamedTuple):
    """The identity of a process towards one that it dials: see plan/callers.py."""

    process: str
    role: str
    rank: int


@dataclass(frozen=True)
class KeyRing:
    """The keys of one process, as Z85 text. `server_secret` and `allowed` are set only if it listens; `allowed` maps
    accepted client keys to process names.
    """

    job: str
    public: str
    private: str = field(repr=False)
    server_public: str
    server_secret: str = field(default="", repr=False)
    allowed: Mapping[str, Identity] = field(default_factory=dict)

    def identity(self, process: str) -> Identity | None:
        """The identity of this process towards the listening one; None if it may not dial it."""
        return next((known for known in self.allowed.values() if known.process == process), None)


def generate(job: str, processes: Mapping[str, Mapping[str, Identity] | None]) -> dict[str, bytes]:
    """The content of each process's key file. `processes`: by name, which processes dial it, None if it does not
    listen.
    """
    server_public, server_secret = _key_pair()
    pairs = {name: _key_pair() for name in processes}
    return {
        name: json.dumps(
            {
                "job": job,
                "public": pairs[name][0],
                "private": pairs[name][1],
                "server_public": server_public,
                "server_secret": "" if callers is None else server_secret,
                "allowed": {pairs[caller][0]: identity for caller, identity in (callers or {}).items()},
            }
        ).encode()
        for name, callers in processes.items()
    }


def _key_pair() -> tuple[str, str]:
    """A public and a private key of CurveZMQ: points of Curve25519 in Z85, as zmq.curve_keypair makes them."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # here, as every command imports this

    private = X25519PrivateKey.generate()
    return _z85(private.public_key().public_bytes_raw()), _z85(private.private_bytes_raw())


def _z85(key: bytes) -> str:
    """ZeroMQ's base 85 (RFC 32): 5 digits, the highest first, for every 4 bytes."""
    numbers = (int.from_bytes(key[at : at + 4], "big") for at in range(0, len(key), 4))
    return "".join(_DIGITS[number // 85**place % 85] for number in numbers for place in (4, 3, 2, 1, 0))


def load(path: str) -> KeyRing | None:
    """The key ring in `path`; None for "". Raises InvalidSettings if it is not a key file or is readable by others."""
    if not path:
        return None
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        if mode & 0o077:
            raise InvalidSettings(f"{path}: others can read the keys (mode {mode:o})", f"chmod 600 {path}")
        fields = json.loads(Path(path).read_bytes())
        allowed = {key: Identity(*identity) for key, identity in fields["allowed"].items()}
        return KeyRing(**{**fields, "allowed": allowed})
    except OSError as error:
        raise InvalidSettings(f"GEOMX_KEY_FILE={path}: {error.strerror}", "start the job with geomx launch") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InvalidSettings(f"{path} is no key file", "start the job with geomx launch") from None
