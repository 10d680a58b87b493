"""Hierarchy of all errors that a user can cause or encounter.

    GeomxError               message, hint, exit_code
    ├── InternalError    1   a bug in geomx
    ├── TrainingFailed   1   a process of the job failed
    │   └── PeerLost     1   another process of the job died or timed out
    ├── UsageError       2   invalid command line
    ├── InvalidSettings  3   invalid inventory, option, environment variable or script call
    ├── HostUnreachable  4   a machine, the source of a data set, or a store of checkpoints cannot be reached
    │   └── WrongHostKey 4   its SSH host key does not match
    ├── CheckFailed      5   a check before, during or after a job failed
    ├── TimedOut         6   a wait reached its limit
    ├── DoneInPart       7   stopped, collected or summarised only in part
    └── Interrupted    130   Ctrl-C
        └── Resumable   75   a job was asked to stop, and all workers have ended with status 0

An error states the problem (`message`) and the remedy (`hint`). Only `cli.py` turns errors into text and an exit
status. Any other exception that escapes is a bug in geomx: it shows its traceback and becomes an InternalError.
"""

from typing import Literal, TypedDict

__all__ = [
    "Blame",
    "CheckFailed",
    "DoneInPart",
    "GeomxError",
    "HostUnreachable",
    "InternalError",
    "Interrupted",
    "InvalidSettings",
    "Missed",
    "PeerLost",
    "Resumable",
    "TimedOut",
    "TrainingFailed",
    "UsageError",
    "WrongHostKey",
]


Missed = Literal["", "gone", "silent"]


class Blame(TypedDict):
    """The fields of PeerLost."""

    peer: str
    observer: str
    missed: Missed
    seconds: float


class GeomxError(Exception):
    """Base class of all errors; never raised itself."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InternalError(GeomxError):
    """A bug in geomx."""


class TrainingFailed(GeomxError):
    """A process of the job failed, and the job with it."""


class PeerLost(TrainingFailed):
    """Another process of the job died, timed out or failed.

    peer: its name, as "A/worker:1"; "" if unknown.
    observer: the process that reported the error. It is `peer` for the peer's own error, and "" for the process that
        raises this.
    missed: "silent" if the observer received nothing from the peer, "gone" if the peer closed its connection,
        otherwise "".
    seconds: how long the peer was missed.
    """

    def __init__(
        self, message: str, hint: str = "", *, peer: str = "", observer: str = "", missed: Missed = "",
        seconds: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(message, hint)
        self.peer = peer
        self.observer = observer
        self.missed = missed
        self.seconds = seconds

    @property
    def blame(self) -> Blame:
        """The fields beside message and hint, as events and reports of failures have them."""
        return {"peer": self.peer, "observer": self.observer, "missed": self.missed, "seconds": self.seconds}


class UsageError(GeomxError):
    """Invalid command line."""

    exit_code = 2


class InvalidSettings(GeomxError):
    """Invalid inventory, option, environment variable or script call."""

    exit_code = 3


class HostUnreachable(GeomxError):
    """A machine, the source of a data set, or a store of checkpoints cannot be reached."""

    exit_code = 4


class WrongHostKey(HostUnreachable):
    """A machine's SSH host key does not match; possibly a man-in-the-middle attack."""


class CheckFailed(GeomxError):
    """A check failed."""

    exit_code = 5


class TimedOut(GeomxError):
    """A wait reached its limit; the message names the awaited condition."""

    exit_code = 6


class DoneInPart(GeomxError):
    """Only a part of the work succeeded; the message says which."""

    exit_code = 7


class Interrupted(GeomxError):
    """The user pressed Ctrl-C."""

    exit_code = 130


class Resumable(Interrupted):
    """A job was asked to stop, and its workers have saved and ended by themselves. If launched again, it may continue.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h
