"""Events on the control machine itself, from its connections and its user; hosts cannot send them."""

from dataclasses import dataclass

__all__ = ["Broken", "Gone", "Interrupt", "LocalEvent", "Mended", "Notice", "Suspend"]


class LocalEvent:
    """Base class of the inbox entries that are not host messages."""


@dataclass(frozen=True)
class Gone(LocalEvent):
    """The agent no longer exists or is unreachable."""

    how: str
    reachable: bool = True


@dataclass(frozen=True)
class Broken(LocalEvent):
    """The connection broke; reconnection is attempted for `limit` seconds (0: without limit)."""

    why: str
    limit: float = 0.0


@dataclass(frozen=True)
class Mended(LocalEvent):
    """The connection is restored."""


@dataclass(frozen=True)
class Notice(LocalEvent):
    """A warning about the connection."""

    message: str


@dataclass(frozen=True)
class Interrupt(LocalEvent):
    """The user asks for the job's end (Ctrl-C)."""


@dataclass(frozen=True)
class Suspend(LocalEvent):
    """The user suspends this process (Ctrl-Z), not the job."""
