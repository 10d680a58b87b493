"""Serializes launches that may choose the same ports."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.core.lock import try_lock
from geomx_cli.core.private import make_folders, make_private

__all__ = ["PortLock"]

_LIMIT = 60.0  # seconds; afterwards proceed without the lock: port conflicts are found by the check or fail at bind
_AGAIN = 0.1
_PATIENCE = 1.0  # seconds before a wait is reported


class PortLock:
    """Held by one launch of this account from its search for free ports until the job listens on them. Without it two
    concurrent launches may choose the same ports, and one of the jobs fails.

    `acquire` waits at most a minute, and then proceeds without the lock. `release` may be called repeatedly. The lock
    is released when the process that holds it ends.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._file = -1

    def acquire(self) -> None:
        """Take the lock. Raises CheckFailed and InvalidSettings if the jobs folder cannot be used."""
        folder = jobs_folder().parent
        began, reported = time.monotonic(), False
        self._file = _open(folder)
        while time.monotonic() - began < _LIMIT:
            if try_lock(self._file, folder, self._note):
                return
            if not reported and time.monotonic() - began > _PATIENCE:
                reported = True
                self._note("waiting up to one minute for another launch to bind its ports")
            time.sleep(_AGAIN)
        self.release()

    def release(self) -> None:
        """Release the lock, if held."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _open(folder: Path) -> int:
    try:
        make_folders(folder)
        make_private(folder)
        return os.open(folder / "ports.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidSettings(f"{folder} cannot be used: {error.strerror}", "set XDG_STATE_HOME") from None
