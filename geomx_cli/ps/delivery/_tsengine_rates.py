"""TSEngine's measurements and choice: what a link carries, and which way a contribution goes.

A sender knows when it has handed bytes to a link; the peer reports how many it has received. So a rate is measured only
while the link is busy, whatever else the round waits for.
"""

import math
import random
from collections import deque
from collections.abc import Mapping

__all__ = ["AGE", "DIRECT", "Meter", "choose"]

DIRECT = -1
"""The way to the root without a relay, in `choose`."""
AGE = 5
"""Rounds after which a rate that was not measured again is no longer known."""
FEW, LAST = 3, 5
"""So many samples are too few to judge a link by, as a process that is busy, as all are at first, receives late: the
highest is its rate. Later the rate is the median of the last ones."""
MARGIN = 1.2
"""How many times faster than the direct way a relay has to be."""
SMALLEST = 64 * 1024
"""Bytes that a sample has at least."""
SPAN = 0.1
"""Seconds of a sample."""
MARKS = 4096
"""Times of sending that are kept: those of the last 40 s at least, as a process looks a hundred times a second."""
IDLE = 4096
"""Bytes on their way that do not make a link busy: reports, credit."""


class Meter:
    """Measures one direction of a link in bytes per second. Times are in time.monotonic seconds.

    A sample of a link that had bytes to carry all the time is its rate. One in which the link was idle at times is at
    most that, as it includes delays of both ends: it counts only if it is higher than what is known.

    rate: 0 if unknown. measured: the round in which it was last measured. moved: when bytes last arrived, or the link
    became busy.
    """

    def __init__(self) -> None:
        self.rate = 0.0
        self.measured = 0
        self.moved = 0.0
        self._samples = deque[float](maxlen=LAST)
        self._taken = 0  # samples since the rate was unknown or old
        # bytes handed over so far, and a time before that; on a link that stays cut nothing is reported
        self._marks = deque[tuple[int, float]](maxlen=MARKS)
        self._looked = -math.inf
        self._sent = self._received = 0
        self._start = 0.0
        self._latency = math.inf  # the least time from a mark to a report of few bytes
        self._was_idle = True
        self._bytes, self._seconds, self._all_busy = 0, 0.0, True

    @property
    def backlog(self) -> int:
        """Bytes handed over and not reported."""
        return self._sent - self._received

    def sent(self, total: int, now: float) -> None:
        """`total` bytes have been handed to the link since it exists, the new ones since the last call."""
        before, self._looked = self._looked, now
        if total <= self._sent:
            return
        if self.backlog <= IDLE:
            self.moved = now
        self._sent = total
        self._marks.append((total, before if math.isfinite(before) else now))

    def received(self, total: int, now: float, round_: int) -> None:
        """The peer has received `total` bytes since the link exists; `round_` is the present one."""
        total = min(total, self._sent)
        news = total - self._received
        if news <= 0:
            return
        first = self._marks[0][1]
        while self._marks and self._marks[0][0] <= total:
            _, mark = self._marks.popleft()
            if news <= IDLE:
                self._latency = min(self._latency, now - mark)
        waited = now - self._start
        if self._was_idle:
            latency = self._latency if math.isfinite(self._latency) else 0.0
            waited = max(0.0, now - max(first, self._start) - latency)
        self._received, self._start, self.moved = total, now, now
        is_idle = self.backlog <= IDLE
        self._all_busy = self._all_busy and not (self._was_idle or is_idle)
        self._was_idle = is_idle
        if news > IDLE:
            self._bytes += news
            self._seconds += waited
        if self._bytes >= SMALLEST and (self._seconds >= SPAN or is_idle):
            self._take(self._bytes / max(self._seconds, 1e-3), round_)
            self._bytes, self._seconds, self._all_busy = 0, 0.0, True

    def restart(self, now: float) -> None:
        """What is on its way was lost with a connection."""
        self._received = self._sent
        self._marks.clear()
        self._was_idle = True
        self._start = self.moved = now

    def is_stale(self, round_: int) -> bool:
        """Whether the rate is too old to be relied on, unknown, or of few samples."""
        return self._taken < FEW or round_ - self.measured > AGE

    def _take(self, rate: float, round_: int) -> None:
        if round_ - self.measured > AGE:
            self._samples.clear()
            self._taken = 0
        self.measured = round_
        self._taken += 1
        if self._samples and not self._all_busy and rate <= self.rate:
            return
        self._samples.append(rate)
        ordered = sorted(self._samples)
        self.rate = ordered[-1 if len(ordered) <= FEW else len(ordered) // 2]


def choose(costs: Mapping[int, float | None], max_greed: float, draw: random.Random) -> int:
    """The way for a contribution, of those in `costs`: the seconds that it takes by each, None where that is unknown.

    With probability min(known / all, max_greed) the fastest known one, where a relay has to be MARGIN times faster than
    DIRECT; else any unknown one, so that it is measured.
    """
    known = {way: cost for way, cost in costs.items() if cost is not None}
    unknown = [way for way, cost in costs.items() if cost is None]
    greed = min(len(known) / len(costs), max_greed)
    if unknown and (not known or draw.random() >= greed):
        return draw.choice(unknown)
    return min(known, key=lambda way: known[way] if way == DIRECT else MARGIN * known[way])
