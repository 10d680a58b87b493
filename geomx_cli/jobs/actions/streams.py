"""This machine's end of the streams from agents: of messages, lines and files. agent/streams.py is the other end.

Each is resumed after a break: files and logs by an offset and a hash of what is here, messages of agents by number.
"""

import hashlib
import shutil
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from geomx_cli.agent.streams import hash_of_start
from geomx_cli.core.conventions import file_name, module_command
from geomx_cli.core.errors import CheckFailed, GeomxError, HostUnreachable, TimedOut
from geomx_cli.core.jsonlines import encode, object_lines
from geomx_cli.core.units import format_bytes
from geomx_cli.core.untrusted import decode, last_line
from geomx_cli.hosts import Connector

__all__ = ["Changed", "FileStream", "HostStream", "Listed", "Received", "Reconnects", "Refused", "ask_agent", "no_room"]

_LINE = 16 << 20  # bytes
_CHUNK = 1 << 18
_SHOWN = 500  # characters of a problem
_LIMIT = 60.0  # seconds
_PAUSE = 1.0
_Result = TypeVar("_Result")


def ask_agent(host: Connector, verb: str, *words: str, limit: float, kind: type[_Result]) -> _Result:
    """Run a verb of the agent on a host, which answers with one object. Raises CheckFailed with the end of its stderr
    for anything else, the host's errors, and TimedOut after `limit` seconds.
    """
    done = host.run(module_command(host.python, "geomx_cli.agent", verb, *words), limit=limit)
    try:
        return decode(last_line(done.output.decode(errors="replace"), ""), kind)
    except ValueError:
        otherwise = f"its answer is invalid (exit status {done.status})"
        what = last_line(done.errors.decode(errors="replace"), otherwise).removeprefix("error: ")
        raise CheckFailed(what) from None


class HostStream:
    """A verb of the agent that runs on a host: the bytes that it prints, as lines and pieces, and its input.

    on_data: called with the number of bytes, whenever some have come. Raises OSError and the host's errors.
    """

    def __init__(
        self, host: Connector, verb: str, directory: str, *arguments: str,
        on_data: Callable[[int], None] = lambda count: None,
    ) -> None:  # fmt: skip
        self.host = host
        self._channel = host.open(module_command(host.python, "geomx_cli.agent", verb, directory, *arguments))
        self._on_data = on_data
        self._packed = b""
        self._unpacker: Any = None
        self._is_between = False  # two streams of zlib, where newlines are
        self._rest = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message. Raises OSError."""
        self._channel.send(encode(message))

    def objects(self, what: str) -> Iterator[bytes]:
        """Yield the lines that begin as objects do, until the end; see `object_lines`."""
        return object_lines(self._channel.receive, what)

    def line(self, *, objects: bool = False) -> bytes:
        """Return the next line; with `objects` the next that begins as an object does, as an interpreter that is a
        wrapper script may print others first. Raises EOFError, and CheckFailed for more than 16 MiB.
        """
        while True:
            while (end := self._rest.find(b"\n")) < 0:
                if len(self._rest) > _LINE:
                    raise CheckFailed("it sent a line without end")
                self._rest += self._received()
            line = bytes(self._rest[:end])
            del self._rest[: end + 1]
            if not objects or line.startswith(b"{"):
                return line

    def some(self, most: int) -> bytes:
        """Return at least one byte and at most `most`. Raises EOFError."""
        if not self._rest:
            self._rest += self._received()
        data = bytes(self._rest[:most])
        del self._rest[:most]
        return data

    def unpack(self) -> None:
        """From here on, the stream is compressed, as streams of zlib with newlines between them."""
        self._is_between = True
        self._unpacker, self._packed = zlib.decompressobj(), bytes(self._rest)
        self._rest.clear()

    def errors(self, otherwise: str = "") -> str:
        """Return the last line of its stderr, or `otherwise`."""
        return last_line(self._channel.errors(), otherwise).removeprefix("error: ")

    def close(self) -> None:
        """Close its input."""
        self._channel.close()

    def _received(self) -> bytes:
        while True:
            data = self._packed
            if not data:
                data = self._channel.receive()
                if not data:
                    raise EOFError
                self._on_data(len(data))
            if self._unpacker is None:
                return data
            if self._is_between:
                data = data.lstrip(b"\n")
                self._is_between = not data
            try:
                data = bytes(self._unpacker.decompress(data, _CHUNK))  # a small stream may unpack to any size
            except zlib.error as error:
                raise CheckFailed(f"what it sends is damaged: {error}") from None
            self._packed = self._unpacker.unconsumed_tail
            if self._unpacker.eof:
                self._is_between, self._packed = True, self._unpacker.unused_data
                self._unpacker = zlib.decompressobj()
            if data:
                return data


class Listed(msgspec.Struct, frozen=True):
    """A file that a host has: its process, its name, for an output below the process's folder, and its size."""

    process: str
    name: str
    size: int

    @property
    def path(self) -> str:
        """The path of an output below the folder of all. No two processes of a job have the same file name."""
        return f"{file_name(self.process)}/{self.name}"


class _Answer(msgspec.Struct):
    size: int = -1
    offset: int = 0
    problem: str = ""


class _Digest(msgspec.Struct):
    sha256: str


class Refused(Exception):
    """A file that cannot be received, for a reason that concerns no other."""


@dataclass(frozen=True)
class Received:
    """size, sha256: of the whole file; offset: where what was sent began; is_new: whether it was written."""

    size: int
    sha256: str
    offset: int
    is_new: bool


class FileStream:
    """The files of one kind of one host. `most`: bytes of a file that are accepted."""

    def __init__(
        self, host: Connector, directory: str, kind: str, on_data: Callable[[int], None], most: int = 1 << 62
    ) -> None:
        self.stream = HostStream(host, "files", directory, kind, on_data=on_data)
        self._host = host.name
        self._most = most
        self._asked: deque[tuple[Listed, Path, int, Any]] = deque()  # what is held of it: path, size and SHA-256

    def listing(self, kind: type[_Result], *, packed: bool) -> _Result:
        """Return the list that the host sends first. packed: what follows is compressed. Raises CheckFailed if there is
        none, and ValueError.
        """
        try:
            found = decode(self.stream.line(objects=True), kind)
        except EOFError:
            raise CheckFailed(self.stream.errors("it has sent no list of its files")) from None
        if packed:
            self.stream.unpack()
        return found

    def ask(self, listed: Listed, held: Path) -> None:
        """Ask for a file. `held` may have its first bytes; if these differ from the host's, the host sends the whole
        file. Raises OSError.
        """
        size, digest = 0, hashlib.sha256()
        if held.is_file():
            with held.open("rb") as file:
                digest = hash_of_start(file, size := held.stat().st_size)
        self._asked.append((listed, held, size, digest))
        request = {"process": listed.process, "name": listed.name, "offset": size, "sha256": digest.hexdigest()}
        with suppress(OSError):  # it has ended: `receive` says why
            self.stream.send(request)

    def receive(self, path: Path, on_progress: Callable[[int], None] = lambda done: None) -> Received:
        """Receive the first of the requested files into `path`, which may have its first bytes. Do nothing if another
        path has the whole file. Raises Refused for it alone, HostUnreachable if the connection breaks, CheckFailed for
        other problems of the host, and OSError.
        """
        listed, held, size, digest = self._asked.popleft()
        try:
            answer = decode(self.stream.line(), _Answer)
            if answer.problem:
                raise Refused(answer.problem[:_SHOWN])
            at = answer.offset
            if at not in (0, size) or answer.size < at or answer.size > self._most:
                raise CheckFailed(f"it sent {listed.name!r} with {answer.size} bytes from byte {at} on")
            if not at:
                digest = hashlib.sha256()
            is_new = held == path or at < answer.size or not held.is_file()
            if is_new:
                if problem := no_room(path, answer.size, at if held == path else 0):
                    raise CheckFailed(f"{listed.name}: {problem}")
                self._write(path, held, at, answer.size, digest, on_progress)
            claimed = decode(self.stream.line(), _Digest).sha256
        except EOFError:
            if what := self.stream.errors():
                raise CheckFailed(what) from None
            raise HostUnreachable(f"host {self._host}: the connection broke") from None
        if claimed != digest.hexdigest():
            raise Changed("it has changed while it was sent")
        return Received(answer.size, claimed, at, is_new)

    def close(self) -> None:
        """End the stream."""
        self.stream.close()

    def _write(
        self, path: Path, held: Path, at: int, size: int, digest: Any, on_progress: Callable[[int], None]
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if at and held != path:
            shutil.copyfile(held, path)
        with path.open("r+b" if at else "wb") as file:
            file.truncate(at)
            file.seek(at)
            while at < size:
                data = self.stream.some(min(_CHUNK, size - at))
                digest.update(data)
                file.write(data)
                at += len(data)
                on_progress(at)


class Changed(Refused):
    """The file was another at the end than at the beginning of its transfer."""


def no_room(path: Path, size: int, at: int) -> str:
    """Why a file of `size` bytes, of which `at` are here, cannot be put at `path`, or ""."""
    folder = next(place for place in path.parents if place.is_dir())
    room = shutil.disk_usage(folder).free
    if size - at <= room:
        return ""
    return f"its host says that it has {format_bytes(size)}, and {path.parent} has room for {format_bytes(room)}"


class Reconnects:
    """Repeats what needs a connection to one host, while that breaks.

    `notify` is told of each interruption, once. Once `over` is set, by any thread, the caller is about to close its
    connections, and none is opened again. Otherwise not thread-safe.
    """

    def __init__(self, notify: Callable[[str], None], over: threading.Event) -> None:
        self._notify = notify
        self._over = over
        self._works = False
        self._broken_since: float | None = None

    def progress(self, count: int) -> None:
        """Note that the host has sent something."""
        self._works, self._broken_since = True, None

    def repeat(self, do: Callable[[], _Result]) -> _Result:
        """Return the result of `do`, which calls `progress` and may be called again after HostUnreachable or TimedOut.

        Raises these if the host has never sent anything, or nothing for 60 s, and once `over` is set.
        """
        while True:
            try:
                return do()
            except (HostUnreachable, TimedOut) as error:
                if not self._goes_on(error):
                    raise
                if self._over.wait(_PAUSE):
                    raise

    def _goes_on(self, error: GeomxError) -> bool:
        now, first = time.monotonic(), self._broken_since is None
        since = self._broken_since = now if self._broken_since is None else self._broken_since
        if self._over.is_set() or not self._works or now - since >= _LIMIT:
            return False
        if first:
            self._notify(f"{error.message}; trying again, for {_LIMIT:g} s at most")
        return True
