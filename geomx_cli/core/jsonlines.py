"""JSON lines: bounded parsing of byte streams, and incremental reading and extension of growing files."""

import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed

__all__ = ["UNWRITTEN", "LineBuffer", "append_object", "decode", "encode", "object_lines", "read_objects"]

_LIMIT = 16 << 20  # bytes

UNWRITTEN = "[geomx event] "
"""Prefix of a line in a process's output. The line has an event for which the event log had no room until the end."""


def encode(message: Mapping[str, Any]) -> bytes:
    """Return a message as one line, including the newline."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes | str) -> dict[str, Any]:
    """Parse the JSON object on a line. Raises ValueError for any other content."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("objects nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


class LineBuffer:
    """Splits a byte stream into lines of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines completed by `data`, without newlines. The iterator must be exhausted.

        Raises ValueError, after the last line, if the remaining incomplete line is too long.
        """
        *whole, end = data.split(b"\n")
        if whole:
            whole[0] = bytes(self._rest + whole[0])
            self._rest.clear()
        self._rest += end
        yield from whole
        if len(self._rest) > self._limit:
            raise ValueError(f"a line of more than {self._limit >> 20} MiB")


def object_lines(receive: Callable[[], bytes], what: str) -> Iterator[bytes]:
    """Yield the complete lines that begin as objects do, until `receive` returns b"". Other lines are dropped, because
    a Python that is a wrapper script may print them first. An unterminated last line is dropped too.

    Raises CheckFailed, with `what` as the sender's name, for a line longer than 16 MiB.
    """
    buffer = LineBuffer(_LIMIT)
    while data := receive():
        try:
            yield from (line for line in buffer.feed(data) if line.startswith(b"{"))
        except ValueError as error:
            raise CheckFailed(f"{what} sent {error}", "see what runs there") from None


def read_objects(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the JSON objects of a file from byte `start` on, each with the offset after it.

    An incomplete last line (no newline yet) is left for the next call; lines that are not JSON objects are skipped.
    """
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                found = decode(line)
            except ValueError:
                continue
            yield found, start


def append_object(path: Path, message: Mapping[str, Any]) -> bool:
    """Append a message to an untrusted file, on a line of its own. Return whether this was possible."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o600)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                return False
            is_torn = found.st_size > 0 and os.pread(file, 1, found.st_size - 1) != b"\n"  # its writer was killed
            line = b"\n" * is_torn + encode(message)
            return os.write(file, line) == len(line)
        finally:
            os.close(file)
    except OSError:  # a link in its place, or no room
        return False
