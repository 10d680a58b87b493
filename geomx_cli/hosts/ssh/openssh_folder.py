"""Folders for sockets and settings of OpenSSH's client."""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

__all__ = ["Folder"]

_PREFIX = "geomx-ssh-"
_LONGEST = 60  # bytes of the folder's path: ssh adds 17 to the socket's, of at most 104 on some systems
_LOCKED = 60.0  # seconds after which a folder has long been locked


class Folder:
    """A folder that only this user can open, with a path short enough for sockets.

    Its process holds a lock on it. If the process is killed, the folder stays, and the next Folder removes it.
    """

    def __init__(self) -> None:
        places = [os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"]
        usable = [each for each in places if each and len(os.fsencode(each)) < _LONGEST and os.access(each, os.W_OK)]
        place = usable[0] if usable else tempfile.gettempdir()
        for left in Path(place).glob(f"{_PREFIX}*"):
            with suppress(OSError):  # also where its process still has it
                _remove(left)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        with suppress(OSError):  # a file system without locks, where nobody gets one to remove it either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """Remove it with its content. Call this once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _remove(left: Path) -> None:
    """Remove a folder whose process has ended. Raises OSError if it has not."""
    file = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(file)
        if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _LOCKED:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left, ignore_errors=True)
    finally:
        os.close(file)
