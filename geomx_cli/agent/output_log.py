"""The log of a process of the job: what it writes to stdout and stderr."""

import fcntl
import os
import struct
import termios
from contextlib import suppress
from pathlib import Path

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.files import open_record
from geomx_cli.core.jsonlines import UNWRITTEN

__all__ = ["OutputLog"]

_TAIL_LINES, _TAIL_BYTES, _LINE_CHARS = 15, 1 << 14, 400
_MOST = 32 << 20  # bytes of a log, and of the one before it
_PIPE = 1 << 20  # bytes that the process may write before the agent reads; more than a turn of its loop
_HELD = 1 << 20  # bytes that are kept while the log cannot be written


class OutputLog:
    """Reads a process's output from a pipe and appends it to a file. Not thread-safe; never waits for the process.

    The agent is the file's only writer, so that no byte can be written between the two steps of a rotation: a log of
    32 MiB becomes NAME.1, replacing that file. A disk that is full does not fail the process: its newest output, up to
    1 MiB, is held and written once there is room, after a line that says how much is missing.

    descriptor: to be read whenever it is readable; -1 before `open` and once all writers have closed the pipe.
    problem: why the file cannot be written now, or "".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = -1
        self.problem = ""
        self._file = -1
        self._held = bytearray()
        self._recent = b""
        self._missing = 0
        self._ends_line = True  # in the file

    def open(self) -> int:
        """Return the end of the pipe for the process; the caller closes it. Raises OSError if there can be no log."""
        self._open_file()
        self.descriptor, writing = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.descriptor, False)
        with suppress(OSError):  # the account's pipes are limited
            fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE)
        return writing

    def drain(self, most: int = _PIPE) -> None:
        """Log at most so many bytes of what has been written."""
        while most > 0 and self.descriptor >= 0:
            try:
                data = os.read(self.descriptor, most)
            except BlockingIOError:
                break
            if not data:
                os.close(self.descriptor)
                self.descriptor = -1
            most -= len(data)
            self._recent = (self._recent + data)[-_TAIL_BYTES:]
            self._append(data)
        if self._held:
            self._append(b"")

    def drain_rest(self) -> None:
        """Log what is in the pipe now; a descendant of an ended process may write on without end."""
        if self.descriptor >= 0:
            waiting = fcntl.ioctl(self.descriptor, termios.FIONREAD, bytes(4))
            self.drain(struct.unpack("i", waiting)[0])

    def begin_anew(self, note: str) -> None:
        """Close the pipe of a process that has ended, and add a line on the next one, which `open` awaits."""
        self.drain_rest()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self._file < 0:  # another agent has written it
            with suppress(OSError, CheckFailed):
                with open_record(self.path) as log:
                    log.seek(max(0, os.fstat(log.fileno()).st_size - 1))
                    self._ends_line = log.read() in (b"", b"\n")
                self._open_file()
        at_line = self._ends_line if not self._held else self._held.endswith(b"\n")
        self._recent = note.encode() + b"\n"
        self._append(b"\n" * (not at_line) + self._recent)

    def tail(self) -> list[str]:
        """Return its last lines, of long ones the beginning; of a progress bar, whose states are separated by "\\r",
        the last state.
        """
        lines = [line.rstrip("\r").rpartition("\r")[2] for line in self.recent if line]
        return [_shown(line) for line in lines if not line.startswith(UNWRITTEN)][-_TAIL_LINES:]

    @property
    def recent(self) -> list[str]:
        """The lines of the newest 16 KiB."""
        return self._recent.decode(errors="replace").rstrip("\n").split("\n")

    def close(self) -> None:
        """Log what is in the pipe, and close both."""
        self.drain_rest()
        for descriptor in (self.descriptor, self._file):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._file = -1

    def _open_file(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.open(self.path, flags, 0o600)
        if self._file >= 0:
            os.close(self._file)
        self._file = file

    def _append(self, data: bytes) -> None:
        self._held += data
        try:
            while self._held:
                note = self._note()
                part = note or self._fitting()
                written = os.write(self._file, part)
                self._ends_line = part[:written].endswith(b"\n")
                if note and written == len(note):
                    self._missing = 0
                elif not note:
                    del self._held[:written]
            self.problem = ""
        except OSError as error:
            self.problem = error.strerror or str(error)
            if (more := len(self._held) - _HELD) > 0:
                self._missing += more
                del self._held[:more]

    def _note(self) -> bytes:
        """A line in place of what is missing before `_held`, or b"" if nothing is."""
        if not self._missing:
            return b""
        line = f"[geomx: {self._missing} bytes are missing here: {self.problem}]\n".encode()
        return line if self._ends_line else b"\n" + line

    def _fitting(self) -> bytes:
        """The beginning of `_held` that the file has room for, to the end of a line; rotates a file that has none."""
        room = _MOST - os.fstat(self._file).st_size
        if len(self._held) <= room:
            return bytes(self._held)
        end = self._held.rfind(b"\n", 0, max(0, room)) + 1
        if not end:
            with suppress(FileNotFoundError):  # removed by a user
                self.path.replace(self.path.with_name(f"{self.path.name}.1"))
            self._open_file()
            end = self._held.rfind(b"\n", 0, _MOST) + 1 or _MOST
        return bytes(self._held[:end])


def _shown(line: str) -> str:
    return line if len(line) <= _LINE_CHARS else f"{line[:_LINE_CHARS]} ..."
