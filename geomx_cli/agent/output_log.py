"""The log of a process of the job: what it writes to stdout and stderr."""

import os
from pathlib import Path

from geomx_cli.agent.safe_open import open_record
from geomx_cli.core.atomic import open_atomic
from geomx_cli.core.errors import CheckFailed

__all__ = ["OutputLog"]

_TAIL_LINES, _TAIL_BYTES, _LINE_CHARS = 15, 1 << 14, 400
_MOST, _KEPT = 64 << 20, 32 << 20  # bytes: maximum size of a log; size kept on truncation


class OutputLog:
    """Tolerates a log that is missing, or that the process has replaced by anything but a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self) -> list[str]:
        """Return its last lines, of long ones the beginning; of a progress bar, whose states are separated by "\\r",
        the last state.
        """
        try:
            with open_record(self.path) as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").rstrip("\n").split("\n")
                return [_shown(line.rstrip("\r").rpartition("\r")[2]) for line in lines if line][-_TAIL_LINES:]
        except (OSError, CheckFailed):
            return []

    def shorten(self) -> None:
        """Rotate it if it is oversized: copy its end to NAME.1, replacing that file, and truncate it. Output written
        concurrently may be lost.
        """
        try:
            with open_record(self.path) as log:
                size = os.fstat(log.fileno()).st_size
                if size <= _MOST:
                    return
                log.seek(size - _KEPT)
                with open_atomic(self.path.with_name(f"{self.path.name}.1")) as kept:
                    for _ in range(_KEPT >> 20):  # bounded: the process may write faster than we read
                        kept.write(log.read(1 << 20))
                os.truncate(self.path, 0)
        except (OSError, CheckFailed):  # not created yet, disk full, or not a regular file
            return


def _shown(line: str) -> str:
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]} ..."
