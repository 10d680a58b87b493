"""This machine as a host. Several planned hosts may lie on it, each with an agent of its own."""

import os
import socket as sockets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from geomx_cli.errors import TimedOut
from geomx_cli.hosts import Channel, Completed

__all__ = ["LocalHost", "python_path"]

_CHUNK = 1 << 16
_ENDING = 1.0


class LocalHost:
    """Commands run as the person who calls, in the current directory."""

    def __init__(self, name: str = "local", python: str = sys.executable) -> None:
        self.name = name
        self.python = python
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """See Host.run."""
        try:
            done = subprocess.run(
                argv, input=data, capture_output=True, timeout=limit, env=_environment(), check=False
            )
        except subprocess.TimeoutExpired:
            raise TimedOut(f"{argv[0]} on {self.name} did not end within {limit:g} s") from None
        return Completed(done.returncode, done.stdout, done.stderr)

    def start(self, argv: Sequence[str], *, log: str) -> int:
        """See Host.start."""
        Path(log).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with Path(log).open("ab") as output:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=_environment(),
                start_new_session=True,
            )
        self._started[process.pid] = process
        return process.pid

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """See Host.put."""
        target = Path(path)
        for folder in reversed([target.parent, *target.parent.parents]):
            folder.mkdir(mode=0o700, exist_ok=True)
        part = target.with_name(f"{target.name}.{threading.get_ident()}.part")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                os.fchmod(file.fileno(), mode)
                file.write(data)
            part.replace(target)
        except OSError:
            part.unlink(missing_ok=True)
            raise

    def get(self, path: str) -> bytes:
        """See Host.get."""
        return Path(path).read_bytes()

    def connect(self, socket: str, pid: int, limit: float) -> Channel:
        """See Host.connect."""
        deadline = time.monotonic() + limit
        while True:
            stream = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
            try:
                stream.connect(socket)
                return _LocalChannel(stream)
            except (FileNotFoundError, ConnectionRefusedError):
                stream.close()
            if self._has_ended(pid):
                raise ConnectionError(f"the agent on {self.name} ended before it listened")
            if time.monotonic() > deadline:
                raise TimedOut(f"the agent on {self.name} did not listen within {limit:g} s")
            time.sleep(0.01)

    def close(self) -> None:
        """See Host.close. Waits a moment for agents that are about to end, so that they are gone afterwards.
        """
        for process in self._started.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_ENDING)

    def _has_ended(self, pid: int) -> bool:
        process = self._started.get(pid)
        return process is not None and process.poll() is not None


class _LocalChannel:
    """A connected unix socket as a channel."""

    def __init__(self, stream: sockets.socket) -> None:
        self._stream = stream

    def send(self, data: bytes) -> None:
        self._stream.sendall(data)

    def receive(self) -> bytes:
        try:
            return self._stream.recv(_CHUNK)
        except OSError:
            return b""

    def close(self) -> None:
        try:
            self._stream.shutdown(sockets.SHUT_RDWR)  # wakes a thread in recv, which close alone does not
        except OSError:
            pass
        self._stream.close()


def python_path() -> str:
    """Our PYTHONPATH, and where geomx_cli was imported from: a checkout that is not installed works as well.
    """
    source = str(Path(__file__).parents[2])
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if source.endswith("-packages") or source in inherited:
        return os.pathsep.join(inherited)
    return os.pathsep.join([*inherited, source])


def _environment() -> dict[str, str]:
    path = python_path()
    return {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)
