"""Files that are replaced as a whole: a reader sees the old content or the new one, also if the writer is killed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

__all__ = ["open_atomic", "write_atomic"]


@contextmanager
def open_atomic(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file, which takes the place of `path` when the block ends without an error, and else is removed.

    Its mode is `mode` without the bits of the umask. A writer that is killed leaves NAME.*.part. Raises OSError.
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
    """Make `content` the whole of a file. Raises as `open_atomic`."""
    with open_atomic(path, mode) as file:
        file.write(content)
