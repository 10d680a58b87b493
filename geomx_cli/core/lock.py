"""A lock between geomx commands on one machine."""

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.private import make_folders

__all__ = ["locked_folder"]


@contextmanager
def locked_folder(folder: Path, file: str = "") -> Iterator[None]:
    """Create `folder` and hold an exclusive lock on it, or on a file in it, which stays: for a command that calls
    another that locks the folder.

    Raises CheckFailed at once if another process, or another call, holds it, and if the folder cannot be written. The
    lock ends with the process, however that ends. On a file system without locks a warning is printed instead.
    """
    flags = os.O_RDWR | os.O_CREAT if file else os.O_RDONLY
    try:
        make_folders(folder)
        lock = os.open(folder / file, flags | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CheckFailed(f"cannot write to {folder}: {error.strerror}", "choose another folder") from None
    try:
        if not _try_lock(lock, folder):
            hint = "wait until it is done, or choose another folder"
            raise CheckFailed(f"another geomx writes to {folder}", hint)
        yield
    finally:
        os.close(lock)


def _try_lock(file: int, folder: Path) -> bool:
    """Lock an open file of `folder` exclusively, until it is closed; return False at once if it is locked elsewhere. On
    a file system without locks there is a warning only.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        what = f"{folder} cannot be locked ({error.strerror}): run one geomx at a time there"
        print(f"warning: {what}", file=sys.stderr, flush=True)
    return True
