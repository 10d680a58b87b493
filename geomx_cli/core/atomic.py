"""Atomic file replacement: readers see the old or the new content, even if the writer is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_atomic", "write_atomic"]


@contextmanager
def open_atomic(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Open a new file that replaces `path` when the block ends without an exception and is removed otherwise.

    Its mode is `mode` minus the umask. A killed writer leaves NAME.*.part. Raises OSError.
    """
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def write_atomic(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the content of a file atomically. Raises as `open_atomic`."""
    with open_atomic(path, mode) as file:
        file.write(content)
