"""Lines, and JSON objects one a line: of a stream, none so long that it fills our memory, and of a file that grows."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed

__all__ = ["lines", "read_objects"]

_LIMIT = 16 << 20  # bytes


def lines(receive: Callable[[], bytes], what: str) -> Iterator[bytes]:
    """The whole lines that `receive` gives, without their ends, until it gives b"". A last one without an end is left
    out.

    Raises CheckFailed, which calls the sender `what`, for a line longer than 16 MiB.
    """
    rest = bytearray()
    while data := receive():
        *whole, end = data.split(b"\n")
        if whole:
            yield bytes(rest + whole[0])
            yield from whole[1:]
            rest.clear()
        rest += end
        if len(rest) > _LIMIT:
            raise CheckFailed(f"{what} sent a line of more than {_LIMIT >> 20} MiB", "see what runs there")


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
                found = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield found, start
