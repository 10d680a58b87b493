"""Opens what a job's processes have written, which may be anything by now: a script can put a link or a pipe there."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from geomx_cli.core.errors import CheckFailed

__all__ = ["open_record"]


def open_record(path: Path) -> BinaryIO:
    """A plain file, for reading; it waits for nobody. Raises CheckFailed that names anything else, a link included,
    FileNotFoundError where there is nothing.
    """
    mode = path.lstat().st_mode
    if stat.S_ISREG(mode):
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        if stat.S_ISREG(os.fstat(file).st_mode):  # still
            return os.fdopen(file, "rb")
        os.close(file)
    raise CheckFailed(f"{path} is {_kind(mode)}, not a plain file: it is left out")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a link" if stat.S_ISLNK(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
