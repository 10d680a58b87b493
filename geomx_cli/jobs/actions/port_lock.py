"""Launches that may choose the same ports choose them one after another."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.private import make_private
from geomx_cli.plan.job_paths import jobs_folder

__all__ = ["PortLock"]

_LIMIT = 60.0  # then the other launch hangs, or takes very long: its ports are found busy, or a bind fails
_AGAIN = 0.1
_PATIENCE = 1.0  # before we say for what we wait


class PortLock:
    """Held by one launch of this account from its look for free ports until the job listens on those it has chosen:
    two that look at the same moment find the same ports free, and one of the jobs fails.

    `acquire` waits a minute at most, and then goes on without it. `release` may be called more than once. The lock ends
    with the process that holds it.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._file = -1

    def acquire(self) -> None:
        """Raises CheckFailed and InvalidSettings where the folder of jobs cannot be used."""
        folder = jobs_folder().parent
        began, told = time.monotonic(), False
        self._file = _open(folder)
        while time.monotonic() - began < _LIMIT:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pass
            except OSError as error:  # a file system that knows no locks
                self._note(f"{folder} cannot be locked ({error.strerror}): do not launch concurrently")
                break
            else:
                return
            if not told and time.monotonic() - began > _PATIENCE:
                told = True
                self._note("waiting up to one minute for another launch to bind its ports")
            time.sleep(_AGAIN)
        self.release()

    def release(self) -> None:
        """Let the next launch look for ports."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _open(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        make_private(folder)
        return os.open(folder / "ports.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidSettings(f"{folder} cannot be used: {error.strerror}", "set XDG_STATE_HOME") from None
