"""Every error that a user can cause or meet, in one tree.

    GeomxError               message, hint, exit_code
    ├── TrainingFailed   1   a process of the job failed
    │   └── PeerLost     1   another process of the job died or fell silent
    ├── UsageError       2   the command line does not make sense
    ├── InvalidSettings  3   an inventory, option, environment variable or script call is wrong
    ├── HostUnreachable  4   a machine cannot be reached
    │   └── WrongHostKey 4   it shows another host key than it should
    ├── CheckFailed      5   a check before, beside or after a job failed
    ├── TimedOut         6   a wait reached its limit
    ├── DoneInPart       7   stopped, collected or summarised only in part
    └── Interrupted    130   Ctrl-C

An error says what is wrong (`message`) and what to do about it (`hint`). `cli.py` is the only place that turns one
into text and an exit status. Anything else that escapes is a defect of geomx and shows its traceback.
"""

__all__ = [
    "CheckFailed",
    "DoneInPart",
    "GeomxError",
    "HostUnreachable",
    "Interrupted",
    "InvalidSettings",
    "PeerLost",
    "TimedOut",
    "TrainingFailed",
    "UsageError",
    "WrongHostKey",
]


class GeomxError(Exception):
    """The root of the tree; never raised itself."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class TrainingFailed(GeomxError):
    """A process of the job failed, and the job with it."""


class PeerLost(TrainingFailed):
    """Another process of the job died, fell silent or gave up; `peer` names it, as in "worker:1 of party A"."""

    def __init__(self, message: str, hint: str = "", *, peer: str = "") -> None:
        super().__init__(message, hint)
        self.peer = peer


class UsageError(GeomxError):
    """The command line does not make sense."""

    exit_code = 2


class InvalidSettings(GeomxError):
    """An inventory, option, environment variable or call in a script is wrong."""

    exit_code = 3


class HostUnreachable(GeomxError):
    """A machine cannot be reached."""

    exit_code = 4


class WrongHostKey(HostUnreachable):
    """A machine shows another host key than it should; somebody may be in between."""


class CheckFailed(GeomxError):
    """A check failed."""

    exit_code = 5


class TimedOut(GeomxError):
    """A wait reached its limit; the message names what was waited for."""

    exit_code = 6


class DoneInPart(GeomxError):
    """Some of the work is done and some is not; the message says which."""

    exit_code = 7


class Interrupted(GeomxError):
    """The user pressed Ctrl-C."""

    exit_code = 130
