"""Opens files written by the job's processes, which are untrusted: a script may put a link or a pipe in their place."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from geomx_cli.core.errors import CheckFailed

__all__ = ["open_below", "open_record"]


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


def open_below(folder: Path, name: str) -> BinaryIO:
    """Open a regular file below `folder` by its relative name, through no link. Raises as `open_record`, and
    CheckFailed for a name that leads elsewhere.
    """
    *folders, last = name.split("/")
    if not all(part not in ("", ".", "..") and "\0" not in part for part in (*folders, last)):
        raise CheckFailed(f"{name!r} does not lie in {folder}")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    at = os.open(folder, flags | os.O_DIRECTORY)
    try:
        for part in folders:
            below = os.open(part, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = below
        file = os.open(last, flags, dir_fd=at)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise CheckFailed(f"{folder / name} is reached through a link, or through what is no folder") from None
        raise
    finally:
        os.close(at)
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(file, "rb")
    os.close(file)
    raise CheckFailed(f"{folder / name} is {_kind(mode)}, not a plain file: it is left out")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "a folder"
    return "a link" if stat.S_ISLNK(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
