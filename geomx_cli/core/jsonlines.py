"""JSON objects one a line: on a stream of bytes, none so long that it fills our memory, and in a file that grows."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed

__all__ = ["LineBuffer", "decode", "encode", "lines", "read_objects"]

_LIMIT = 16 << 20  # bytes


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as a line, with its end."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes | str) -> dict[str, Any]:
    """The object on a line. Raises ValueError for anything else."""
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("objects nested too deep") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found


class LineBuffer:
    """Cuts what comes from a stream into lines, each of at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that `data` completes, without their ends. To be read to its end.

        Raises ValueError, behind them, where the line that it leaves incomplete is too long.
        """
        *whole, end = data.split(b"\n")
        if whole:
            whole[0] = bytes(self._rest + whole[0])
            self._rest.clear()
        self._rest += end
        yield from whole
        if len(self._rest) > self._limit:
            raise ValueError(f"a line of more than {self._limit >> 20} MiB")


def lines(receive: Callable[[], bytes], what: str) -> Iterator[bytes]:
    """The whole lines that `receive` gives until it gives b"". A last one without an end is left out.

    Raises CheckFailed, which calls the sender `what`, for a line longer than 16 MiB.
    """
    buffer = LineBuffer(_LIMIT)
    while data := receive():
        try:
            yield from buffer.feed(data)
        except ValueError as error:
            raise CheckFailed(f"{what} sent {error}", "see what runs there") from None


def read_objects(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each whole JSON object of a file from byte `start` on, with the offset behind it.

    A line that is still being written (no newline yet) is left for the next call; one that is no JSON object is
    passed over.
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
