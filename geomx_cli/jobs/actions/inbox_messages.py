"""Messages in the inbox from the control machine itself: from its connections and its user; hosts cannot send them."""

from dataclasses import dataclass

__all__ = ["Broken", "Gone", "Interrupt", "InboxMessage", "Mended", "Notice", "Suspend"]


class InboxMessage:
    """Base class of the messages in the inbox that no host has sent."""


@dataclass(frozen=True)
class Gone(InboxMessage):
    """The agent no longer exists or is unreachable."""

    how: str
    reachable: bool = True


@dataclass(frozen=True)
class Broken(InboxMessage):
    """The connection broke; reconnection is attempted for `limit` seconds (0: without limit)."""

    why: str
    limit: float = 0.0


@dataclass(frozen=True)
class Mended(InboxMessage):
    """The connection is restored."""


@dataclass(frozen=True)
class Notice(InboxMessage):
    """A warning about the connection."""

    message: str


@dataclass(frozen=True)
class Interrupt(InboxMessage):
    """The user asks for the job's end, `by` Ctrl-C or the signal of this name."""

    by: str


@dataclass(frozen=True)
class Suspend(InboxMessage):
    """The user suspends this process (Ctrl-Z), not the job."""
