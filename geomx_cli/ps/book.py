"""What a server keeps of one slice: its value, and the rounds that are open."""

import time
from dataclasses import dataclass, field

from geomx_cli.ps.algorithm import Slot
from geomx_cli.ps.gather import Gathering
from geomx_cli.ps.link import Link
from geomx_cli.ps.wire import Header

__all__ = ["Asker", "Book", "Pace", "Round"]


@dataclass(slots=True)
class Asker:
    """Who waits for a result, and the number of its request."""

    link: Link
    request: int
    priority: int


@dataclass(slots=True)
class Round:
    """A round that is not over. `askers` by the rank of whose contribution they sent; `wanted` are the ranks that were
    asked for theirs out of turn.
    """

    gathering: Gathering = field(default_factory=Gathering)
    askers: dict[int, Asker] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    wanted: set[int] = field(default_factory=set)


@dataclass(slots=True)
class Pace:
    """The rounds of members who go through them together: all of a server's, or one party's where each goes alone.

    closed: the last round that is decided. finished: the last one that is answered. result: who is in that.
    held: who is in a root's round that is in the value and not yet answered, because others are too far behind.
    version: that of the value which the last round has led to, or which its members were given since.
    """

    member: int
    rounds: dict[int, Round] = field(default_factory=dict)
    closed: int = 0
    finished: int = 0
    result: Header = field(default_factory=Header)
    held: Gathering | None = None
    version: int = 0


@dataclass(slots=True)
class Book:
    """One slice. `forwarded`: rounds that have gone up to the root. `fetching`: the value is on its way from there.
    `hyper`: what its optimizer was told.
    """

    slot: Slot
    root: int
    length: int
    dtype: int
    offset: int
    forwarded: int = 0
    fetching: bool = False
    paces: dict[int, Pace] = field(default_factory=dict)
    pulls: list[Asker] = field(default_factory=list)
    hyper: dict[str, float] = field(default_factory=dict)

    def pace(self, member: int) -> Pace:
        """That of one member, or with 0 of all who go together."""
        pace = self.paces.get(member)
        if pace is None:
            pace = self.paces[member] = Pace(member)
        return pace
