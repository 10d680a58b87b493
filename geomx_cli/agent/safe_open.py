"""Opens files written by the job's processes, which are untrusted: a script may put a link or a pipe in their place."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from geomx_cli.core.errors import CheckFailed

__all__ = ["open_record"]


def open_record(path: Path) -> BinaryIO:
    """Open a regular file for reading, without blocking. Raises CheckFailed for any other type, including links, and
    FileNotFoundError.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(file).st_mode):  # recheck after open
            return os.fdopen(file, "rb")
        os.close(file)
    raise CheckFailed(f"{path} is {_kind(mode)}, not a plain file: it is left out")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a link" if stat.S_ISLNK(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
