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
from typing import TYPE_CHECKING, NamedTuple

from geomx_cli.core.errors import InvalidSettings

if TYPE_CHECKING:
    import zmq

__all__ = ["Identity", "KeyRing", "ZapAuthenticator", "generate", "load"]


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
    import zmq  # here, as every command imports this module

    server_public, server_secret = (key.decode() for key in zmq.curve_keypair())
    pairs = {name: tuple(key.decode() for key in zmq.curve_keypair()) for name in processes}
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


class ZapAuthenticator:
    """Answers libzmq's authentication requests (ZAP, RFC 27) in the loop's own thread, and counts refusals.

    Messages on accepted connections carry the name of the process that the key was made for, as "User-Id".
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: KeyRing) -> None:
        import zmq.utils.z85

        self._allowed = {zmq.utils.z85.decode(key): known.process.encode() for key, known in keys.allowed.items()}
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")
        self.refused = 0

    def answer(self) -> None:
        """Handle one request; called by the loop when the socket is readable."""
        version, request, _domain, _address, _identity, mechanism, *credentials = self.socket.recv_multipart()
        welcome = mechanism == b"CURVE" and bool(credentials) and credentials[0] in self._allowed
        self.refused += not welcome
        status = (b"200", b"OK") if welcome else (b"400", b"this key may not come in here")
        name = self._allowed[credentials[0]] if welcome else b""
        self.socket.send_multipart([version, request, *status, name, b""])
