"""Connector for this machine. Several planned hosts may share it, each with its own agent."""

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from geomx_cli.core.errors import TimedOut
from geomx_cli.core.files import open_atomic
from geomx_cli.hosts.interface import Channel, Completed

__all__ = ["LocalConnector", "python_path"]

_CHUNK = 1 << 16
_ERRORS = 4096
_ENDING = 2.0


class LocalConnector:
    """Runs commands as the current user in the current directory."""

    address = "127.0.0.1"

    def __init__(self, name: str = "local", python: str = sys.executable) -> None:
        self.name = name
        self.python = os.path.expanduser(python)  # noqa: PTH111 - keeps bare command names
        self._channels: list[_LocalChannel] = []
        self._closed = False
        self._changing = threading.Lock()

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """See Connector.run."""
        try:
            done = subprocess.run(
                argv, input=data, capture_output=True, timeout=limit, env=_environment(), check=False
            )
        except subprocess.TimeoutExpired:
            what = f"{argv[0]} on {self.name} did not end within {limit:g} s"
            raise TimedOut(what, "see whether this machine is overloaded, or its disk hangs") from None
        return Completed(done.returncode, done.stdout, done.stderr)

    def open(self, argv: Sequence[str]) -> Channel:
        """See Connector.open."""
        with self._changing:
            ended = [channel for channel in self._channels if channel.ended]
            self._channels = [channel for channel in self._channels if channel not in ended]
        for channel in ended:
            channel.close()
            channel.finish(_ENDING)
        channel = _LocalChannel(argv)
        with self._changing:
            if not self._closed:
                self._channels.append(channel)
                return channel
        channel.close()
        channel.finish(_ENDING)
        raise OSError(f"the connection to {self.name} was closed meanwhile")

    def check_files(self) -> None:
        """See Connector.check_files: nothing can be lacking here."""

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """See Connector.put."""
        target = Path(path)
        for folder in reversed([target.parent, *target.parent.parents]):
            folder.mkdir(mode=0o700, exist_ok=True)
        with open_atomic(target, mode) as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)

    def get(self, path: str) -> bytes:
        """See Connector.get."""
        return Path(path).read_bytes()

    def close(self) -> None:
        """See Connector.close. Waits briefly for commands to exit, then kills them."""
        with self._changing:
            self._closed = True
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()
        for channel in channels:
            channel.finish(_ENDING)


class _LocalChannel:
    """A child process with pipes as a channel. A thread drains its stderr."""

    def __init__(self, argv: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        # In its own session: Ctrl-C must reach only this process, which then informs the agents.
        self._process = subprocess.Popen(
            argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, env=_environment(), start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self._sending = threading.Lock()
        self._read = False  # to the end
        self._errors = b""
        self._listener = threading.Thread(target=self._listen, name="stderr", daemon=True)
        self._listener.start()

    def send(self, data: bytes) -> None:
        with self._sending:
            if self._stdin.closed:
                raise BrokenPipeError("the channel is closed")
            rest = memoryview(data)
            while rest:
                rest = rest[self._stdin.write(rest) or 0 :]

    def receive(self) -> bytes:
        try:
            data = self._stdout.read(_CHUNK) or b""
        except (OSError, ValueError):  # closed by `finish`
            return b""
        self._read = not data
        return data

    @property
    def ended(self) -> bool:
        """Whether the command has ended and its output has been received."""
        return self._read and self._process.poll() is not None

    def errors(self) -> str:
        if self._process.poll() is not None:
            self._listener.join(_ENDING)
        return self._errors.decode(errors="replace")

    def close(self) -> None:
        if self._sending.acquire(timeout=_ENDING):
            with suppress(OSError):
                self._stdin.close()
            self._sending.release()
        else:  # it does not read its stdin
            self._process.kill()

    def finish(self, limit: float) -> None:
        """Wait at most `limit` seconds for the exit, then kill; close the pipes."""
        try:
            self._process.wait(limit)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(limit)  # a detached child may hold the pipe open
        if not self._listener.is_alive():
            self._stdout.close()
            self._stderr.close()

    def _listen(self) -> None:
        while data := self._stderr.read(_CHUNK):
            self._errors = (self._errors + data)[-_ERRORS:]


def python_path() -> str:
    """Return PYTHONPATH extended by the import location of geomx_cli, so that an uninstalled checkout works."""
    source = str(Path(__file__).parents[2])
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if source.endswith("-packages") or source in inherited:
        return os.pathsep.join(inherited)
    return os.pathsep.join([*inherited, source])


def _environment() -> dict[str, str]:
    path = python_path()
    return {**os.environ, "PYTHONPATH": path} if path else dict(os.environ)
