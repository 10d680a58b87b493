"""Detects dead peers. Both ends of a link send a heartbeat each second. Silence causes a warning, then an error.

A heartbeat carries the sender's clock, and echoes the newest clock that it received. So each end knows until when the
link worked in both directions, however long a message was in flight. A heartbeat also carries the time of the last
progress at or behind the sender: a tensor, credit for a tensor, or training code that runs (`active`). So a process
    that waits for a round knows that the round makes progress on a slow link elsewhere, or that others are still
    computing.

Python code that holds the interpreter's lock stops the loop, but not libzmq's thread, which answers the probes of
sockets.py. So a peer that sends nothing and answers probes is running. If an agent supervises the peer, others wait for
it, because the agent also sees whether the peer computes, ends or is stopped. Otherwise `silence` decides.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from geomx_cli.core.errors import PeerLost
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import WarningRaised
from geomx_cli.ps.net.lanes import QUIET
from geomx_cli.ps.net.link import Link
from geomx_cli.ps.net.loop import Loop
from geomx_cli.ps.net.sockets import UNANSWERED

__all__ = ["Activity", "Liveness", "NEWS", "newest"]

# Whether a process's training code runs, by the processor time that it uses. While it runs, others wait for the
# process.

SPAN = 0.5
"""The least number of seconds between measurements."""
POLLS, COMPUTES = 1e-4, 0.03
"""Shares of a processor. The main thread runs if it uses POLLS. A thread that sleeps between looks at a clock uses
several times POLLS, and a thread that waits for a lock or a message uses nothing. Other threads, and the processes that
this one has started, count from COMPUTES on, because monitors and idle loaders of data wake up now and then.
"""
MOST_CHILDREN = 64
TICK = 1 / os.sysconf("SC_CLK_TCK")


class Activity:
    """Measures the process, except the measuring thread, from the first call of `last`.

    waits: whether the process waits for others at present. The processor time that it uses meanwhile, for example to
        ask whether others wait for it, is no training.
    """

    def __init__(self) -> None:
        self._main_clock = time.pthread_getcpuclockid(threading.main_thread().ident or 0)
        self._ran = self._measured = 0.0
        self._main = self._rest = 0.0
        self.waits = False
        self._children: float | None = None  # only while nothing else runs, because it looks at each thread

    def last(self) -> float:
        """When the training code last ran, as far as measured (time.monotonic seconds)."""
        now = time.monotonic()
        span = now - self._measured
        if span >= SPAN:
            main = time.clock_gettime(self._main_clock)
            rest = time.process_time() - main - time.thread_time()
            if self.waits:
                self._children = None
            elif main - self._main >= POLLS * span or rest - self._rest >= COMPUTES * span:
                self._ran, self._children = now, None
            else:
                before, self._children = self._children, _descendants_used()
                if before is not None and self._children - before >= COMPUTES * span:
                    self._ran = now
            self._main, self._rest, self._measured = main, rest, now
        return self._ran


def _descendants_used() -> float:
    """Seconds of processor time of this process's child processes and their descendants."""
    used, found, children = 0.0, 0, list(_children(os.getpid()))
    while children and (found := found + 1) <= MOST_CHILDREN:
        pid = children.pop()
        children += _children(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        used += (int(fields[11]) + int(fields[12])) * TICK
    return used


def _children(pid: int) -> Iterator[int]:
    """The processes that any thread of `pid` has started."""
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())
    except OSError:  # it has just ended, or the kernel has no such file
        return


BEAT = 1.0
RETURN, LEAVE = 10.0, 3.0
"""Seconds within which a peer that closed its connection may come back: for any peer, and for one that may leave."""
WAS_HEARD, UNSTEADY, CALM = 0.9 * UNANSWERED, 2.5, 10.0
"""Seconds. A connection is given up UNANSWERED seconds after its last bytes got through. So if a connection ends sooner
after a beat that the peer has received, the peer closed it. But a kernel counts from the first loss, and does not begin
again if a cut link works for a moment. So the cause is known only if, for CALM seconds before, all beats were answered
within UNSTEADY."""
REST = 1.0
"""Seconds in which messages of an ended connection may still be read."""
NEWS = 3.0
"""The most seconds until a worker learns, beat by beat, of progress elsewhere."""
SILENT = 2.0
"""Seconds without a heartbeat after which a link is checked more closely."""
STALLED = 12.0
"""Seconds in which bytes that the system has acknowledged do not arrive at the peer. Then a proxy has lost them."""
LATE = 2.0
"""Seconds by which one of our own beats may be late. If it is later, this process was stopped or had no processor."""


class Liveness:
    """Monitors links from `watch` to `forget`. Used by the loop's thread only.

    silence: seconds after which a silent link is lost.
    interval: seconds between heartbeats, at most BEAT.
    on_lost: called once for a link that was silent for so long, or whose peer closed it and did not reconnect. The link
        is then forgotten.
    active: returns when this process itself last worked on what others wait for (time.monotonic seconds).
    supervised: whether agents report when a process ends, hangs or is stopped. If so, a closed connection may also have
        been reset on the way.
    """

    def __init__(
        self,
        loop: Loop,
        process: str,
        events: EventLog,
        *,
        silence: float,
        interval: float,
        on_lost: Callable[[Link, PeerLost], None],
        active: Callable[[], float],
        supervised: bool,
    ) -> None:
        self._loop = loop
        self._process = process
        self._events = events
        self._silence = silence
        self._interval = min(BEAT, interval)
        self._on_lost = on_lost
        self._active = active
        self._supervised = supervised
        self._links: dict[Link, float] = {}  # when its silence began (monotonic), if reported; otherwise 0
        self._limits: dict[Link, float] = {}  # of links that may be silent for longer
        self._leaving: set[Link] = set()
        self._last = 0.0

    def start(self) -> None:
        """Start sending heartbeats and checking links."""
        self._last = time.monotonic()
        self._loop.every(self._interval, self._tick)

    def watch(self, link: Link, silence: float = 0.0) -> None:
        """Start monitoring this peer. Idempotent.

        silence: seconds for which this link may be silent, if they are more than for other links.
        """
        self.allow(link, silence)
        if link not in self._links:
            link.health.expect()
            self._links[link] = 0.0

    def allow(self, link: Link, silence: float = 0.0) -> None:
        """Change for how long this link may be silent, see `watch`."""
        self._limits.pop(link, None)
        if silence > self._silence:
            self._limits[link] = silence

    def silence(self, link: Link) -> float:
        """Seconds without a heartbeat; 0 if the peer's libzmq answers probes, as the peer then runs."""
        silent = time.monotonic() - link.health.heard
        return 0.0 if silent >= SILENT and link.health.runs(link.lanes.connections.get("control")) else silent

    def closed(self, link: Link) -> None:
        """The connection that carries this link's heartbeats has ended."""
        # A peer that died closes its connection on a healthy link. On a link that was unsteady, the connection was
        # probably cut instead; then only `silence` decides.
        now = time.monotonic()
        if now - link.health.echoed < WAS_HEARD and now - link.health.unsteady > CALM:
            link.health.closed = link.health.closed or now

    def renewed(self, link: Link) -> None:
        """This peer has been restarted. Its earlier silence no longer counts."""
        if link in self._links:
            self._links[link] = 0.0

    def release(self, link: Link) -> None:
        """This peer may end: count a closed connection as lost soon."""
        self._leaving.add(link)

    def forget(self, link: Link) -> None:
        """This peer has sent its final message: stop monitoring it."""
        self._links.pop(link, None)
        self._limits.pop(link, None)
        self._leaving.discard(link)

    def _tick(self) -> None:
        # A late tick means that this process was stopped or starved, so no peer is to blame for that time.
        now = time.monotonic()
        pause, self._last = now - self._last - self._interval, now
        if pause > LATE:
            for link in self._links:
                link.health.excuse(pause)
        self._send_beats(now)
        for link in list(self._links):
            self._check(link, now)

    def _send_beats(self, now: float) -> None:
        """Report progress: to members below, progress on any link; to peers above, progress below."""
        own = self._active()
        below = max(own, newest(link for link in self._links if not link.dialled))
        anywhere = max(own, newest(self._links))
        for link in self._links:
            moved = below if link.dialled else anywhere
            age = {"moved": max(0.0, now - moved)} if moved else {}
            body = {"clock": now, "echo": link.health.clock, "delay": link.health.echo_delay(), **age}
            if (tensors := link.lanes.connections.get("tensors")) is not None:
                body |= {"acknowledged": tensors.acknowledged(), "taken": tensors.received()}
            link.control("alive", body)

    def _check(self, link: Link, now: float) -> None:
        if link.health.echoed and now - link.health.echoed > UNSTEADY:
            link.health.unsteady = now
        silent = now - link.health.heard
        if link.dialled and silent < SILENT:
            self._check_tensors(link)
        # begins early, because the check takes some seconds
        runs = silent >= SILENT and link.health.runs(link.lanes.connections.get("control"))
        if self._links[link]:
            if silent < QUIET:
                gap = link.health.heard - self._links[link]
                self._links[link] = 0.0
                self._warn(f"{link.name} is back on link {self._process} - {link.name}, after {gap:.0f} s")
        elif silent >= min(QUIET, self._silence / 2):
            self._links[link] = link.health.heard
            since = time.strftime("%H:%M:%S", time.localtime(time.time() - silent))
            limited = f"for {self._limit(link):g} s at most (--{'absence' if link in self._limits else 'silence'})"
            what = f"reconnecting, {limited}"
            if runs:
                what = f"it has not ended, and is waited for{'' if self._supervised else f', {limited}'}"
            self._warn(
                f"no heartbeat from {link.name} on link {self._process} - {link.name} since {since} ({silent:.0f} s);"
                f" {what}"
            )
        error = None if runs and self._supervised else self._verdict(link, now)
        if error is not None:
            self.forget(link)
            self._on_lost(link, error)

    def _check_tensors(self, link: Link) -> None:
        """Dial a lane again if its bytes do not arrive at one of the ends, though they are acknowledged."""
        tensors = link.lanes.connections.get("tensors")
        if tensors is not None and link.health.lost_bytes(tensors) > STALLED:
            on = f"link {self._process} - {link.name}"
            self._warn(f"what is sent on {on} is acknowledged and does not arrive; dialling again")
            tensors.shut_down()

    def _verdict(self, link: Link, now: float) -> PeerLost | None:
        """Why this peer is considered lost, or None."""
        name, silent = link.name, now - link.health.heard
        where = f"on link {self._process} - {name}"
        if silent > self._limit(link):
            hint = "see its log, whether its machine runs, and the link; a link that is cut for longer needs a longer"
            hint += " --absence" if link in self._limits else " --silence"
            what = f"{name} has been silent for {silent:.0f} s {where}"
            return PeerLost(what, hint, peer=name, missed="silent", seconds=silent)
        if link.health.heard > link.health.closed + REST:
            # It was an older connection: the system may reuse its descriptor before the close is reported.
            link.health.closed = 0.0
        limit = LEAVE if link in self._leaving else self._limit(link) if self._supervised else RETURN
        if link.health.closed and now - link.health.closed > limit:
            gone = now - link.health.closed
            what = f"{name} has been gone for {gone:.0f} s {where}: it closed the connection"
            return PeerLost(what, "it has died, or was ended; see its log", peer=name, missed="gone", seconds=gone)
        return None

    def _limit(self, link: Link) -> float:
        return self._limits.get(link, self._silence)

    def _warn(self, message: str) -> None:
        self._events.write(WarningRaised(message=message))


def newest(links: Iterable[Link]) -> float:
    """The latest progress on or behind any of these links (time.monotonic seconds); 0 for never."""
    return max((link.health.progress() for link in links), default=0.0)
