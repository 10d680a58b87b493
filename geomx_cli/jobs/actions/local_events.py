"""What happens on the control machine itself: to its connections, and by its user. No host can say any of this."""

from dataclasses import dataclass

__all__ = ["Broken", "Gone", "Interrupt", "LocalEvent", "Mended", "Notice", "Suspend"]


class LocalEvent:
    """Base of what goes into the inbox beside the messages of hosts."""


@dataclass(frozen=True)
class Gone(LocalEvent):
    """There is no agent any more, or none that can be reached."""

    how: str
    reachable: bool = True


@dataclass(frozen=True)
class Broken(LocalEvent):
    """The connection broke; it is tried again for `limit` seconds, 0: for as long as it takes."""

    why: str
    limit: float = 0.0


@dataclass(frozen=True)
class Mended(LocalEvent):
    """The connection works again."""


@dataclass(frozen=True)
class Notice(LocalEvent):
    """A warning about the connection."""

    message: str


@dataclass(frozen=True)
class Interrupt(LocalEvent):
    """The user wants the job to end (Ctrl-C)."""


@dataclass(frozen=True)
class Suspend(LocalEvent):
    """The user wants to stop this process (Ctrl-Z), not the job."""
