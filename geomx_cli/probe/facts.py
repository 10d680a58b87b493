"""Collects facts about this host, without leaving anything on it."""

import hashlib
import os
import platform
import pwd
import re
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import geomx_cli
from geomx_cli.probe import interfaces, machine, ports

if TYPE_CHECKING:
    from importlib.metadata import Distribution

__all__ = ["PACKAGE", "code_digest", "facts"]

PACKAGE = Path(geomx_cli.__file__).parent
_MOST_PORTS, _MOST = 1024, 64


def facts(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of probe_pool.Facts, which documents them.

    `request` has `state_dir` and `workdir` ("~" is the account's home), `temp` (a folder for unix sockets; "": the
    one for temporary files), `modules` and `distributions` (to look up), `binds` (addresses or interfaces), `ports`
    (candidates to try there), and `gpus` (whether to query GPUs, which may take seconds).
    """
    addresses = interfaces.addresses()
    temp = request["temp"] or tempfile.gettempdir()
    binds = [address for name in request["binds"][:_MOST] for address in addresses.get(name, [name])]
    wanted = [int(port) for port in request["ports"][:_MOST_PORTS]]
    reserved = ports.reserved(ports.PROBED)
    others = {address: {each.port for each in reserved if each.is_at(address)} for address in dict.fromkeys(binds)}
    free = {
        address: ports.free(address, [port for port in wanted if port not in own]) for address, own in others.items()
    }
    return {
        "version": geomx_cli.__version__,
        "code": code_digest(),
        "package": str(PACKAGE),
        "python": platform.python_version(),
        "executable": sys.executable,
        "home": str(Path.home()),
        "user": _user(),
        "boot": machine.boot(),
        "clock": time.time(),
        "state": _folder(_path(request["state_dir"] or _usual_state())),
        "work": _folder(_path(request["workdir"] or "~")),
        "temp": temp,
        "sockets": _sockets_error(temp),
        "uid": os.getuid(),
        "addresses": addresses,
        "free": {address: found for address, (found, error) in free.items() if not error},
        "taken": {
            **_taken(wanted, [found for found, error in free.values() if not error]),
            **dict.fromkeys(sorted(set(wanted).intersection(set().union(*others.values())))[:_MOST], ports.ANOTHER),
        },
        "unusable": {address: error for address, (_, error) in free.items() if error},
        "memory": machine.memory(),
        "cores": machine.cores(),
        "slow_start": machine.slow_start(),
        "shared_memory": machine.shared_memory(),
        "gpus": machine.gpus() if request["gpus"] else [],
        "missing": [name for name in request["modules"][:_MOST] if not _is_there(name)],
        "versions": _versions(request["distributions"][:_MOST]),
    }


def _taken(wanted: Sequence[int], free: Iterable[Collection[int]]) -> dict[int, str]:
    everywhere = set(wanted).intersection(*free)
    return ports.holders([port for port in wanted if port not in everywhere][:_MOST])


def code_digest() -> str:
    """Return a digest of geomx's source code, independent of its location, without the templates of `geomx init`: a
    wheel contains them, an editable installation has them elsewhere.
    """
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.is_relative_to(PACKAGE / "templates"):
            continue
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _usual_state() -> str:
    """Return the default of platformdirs, which may not be installed here."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return f"{base if base.startswith('/') else '~/.local/state'}/geomx"


def _path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def _folder(path: Path) -> dict[str, Any]:
    """Return whether the folder exists, and whether it, or the parent it would be created in, is writable."""
    place = path
    while not os.path.exists(place) and place != place.parent:  # noqa: PTH110  # Path.exists may raise
        place = place.parent
    error, free = "", 0
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"\0")
        system = os.statvfs(place)
        free = system.f_bavail * system.f_frsize
    except OSError as failure:
        error = failure.strerror or str(failure)
    return {"path": str(path), "exists": os.path.isdir(path), "error": error, "free": free}  # noqa: PTH112


def _sockets_error(temp: str) -> str:
    """Return why no unix socket can be created in a new folder in `temp`, or ""."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix="gx-", dir=temp) as folder,
            socket.socket(socket.AF_UNIX) as made,
        ):
            made.bind(f"{folder}/s")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    from importlib import metadata

    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if (cuda := _cuda(metadata.distribution(name))) is not None:
            found[f"{name}.cuda"] = cuda
        if nccl := _nccl(metadata.requires(name) or ()):
            found[f"{name}.nccl"] = nccl
    return found


def _nccl(requirements: Iterable[str]) -> str:
    """Return the version of NCCL that is installed for a package with these requirements; "" for none."""
    from importlib import metadata

    for text in requirements:
        if (named := re.match(r"nvidia-nccl-cu\d+", text)) is not None:
            try:
                return metadata.version(named[0])
            except metadata.PackageNotFoundError:
                continue
    return ""


def _cuda(distribution: "Distribution") -> str | None:
    """Return the version of CUDA for which a package is built, as its version.py says: "" for none, None if it says
    nothing.
    """
    try:
        text = Path(str(distribution.locate_file(f"{distribution.name}/version.py"))).read_text()
    except (OSError, ValueError):
        return None
    found = re.search(r"^cuda\b[^=]*= *(?:'([0-9.]+)'|None)", text, re.MULTILINE)
    return None if found is None else found[1] or ""
