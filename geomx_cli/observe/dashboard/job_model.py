"""The page's model of a running or finished job: the states of its processes, and curves, links between parties,
messages and the use of its hosts.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from geomx_cli.core import events
from geomx_cli.core.agent_protocol import HostUsage
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.events import (
    VALIDATION_LOSS,
    Evaluated,
    Event,
    ProcessFailed,
    ProcessFinished,
    ProcessRestarted,
    Reported,
    Telemetry,
    Traffic,
    WarningRaised,
)
from geomx_cli.core.jsonlines import decode
from geomx_cli.core.untrusted import plain
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.actions.logs import LogReader
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.reducer import ProcessState
from geomx_cli.observe.dashboard.curves import Curves
from geomx_cli.observe.dashboard.job_rows import MOST_ROWS, by_party, row, totals
from geomx_cli.plan import Plan

__all__ = ["EventReader", "JobModel", "LogSearch"]

# Reads a job's events from its hosts, over the same path as its logs.

# The page's log viewer: the ends of the logs of a job's processes, or their lines with a given text.

MOST_LINES = 500
MOST_SEARCHED = 20_000  # lines in all
MOST_PROCESSES = 100
LONGEST = 1000  # characters of a line
LIMIT = 20.0  # seconds
BUSY = "a search is already running"


class LogSearch:
    """Reads logs from their hosts, as `geomx logs` does, one request at a time. Must be closed: connections stay open
    for the next search.
    """

    def __init__(self, job: KnownJob) -> None:
        self._job = job
        self._hosts: dict[str, Connector] = {}
        self._lock = threading.Lock()

    def find(self, process: str, text: str) -> dict[str, Any]:
        """Return, for JSON, the last lines of a process ("" for all) that contain `text`, in any case: at most 500 of
        the last 20000, cut after 1000 characters. Logs that are not read within 20 s are problems.

        Raises InvalidSettings for an unknown process, CheckFailed if another search runs or there are too many logs.
        """
        known = self._job.plan.processes
        chosen = [self._job.plan.process(process)] if process else list(known)
        if len(chosen) > MOST_PROCESSES:
            raise CheckFailed(f"there are {len(chosen)} logs", "choose one process; geomx logs reads all of them")
        if not self._lock.acquire(blocking=False):
            raise CheckFailed(BUSY, "try again in a few seconds")
        try:
            self._hosts = self._hosts or self._job.open_hosts()
            reader = LogReader(self._job, chosen, lambda text: None, hosts=self._hosts)
            return self._read(reader, MOST_SEARCHED // len(chosen), text)
        finally:
            self._lock.release()

    def close(self) -> None:
        """Close the connections; a later search opens them again."""
        everywhere(lambda host: host.close(), self._hosts.values())

    def _read(self, reader: LogReader, lines: int, text: str) -> dict[str, Any]:
        late = threading.Event()

        def stop() -> None:
            late.set()
            reader.close()
            self.close()

        timer = threading.Timer(LIMIT, stop)
        timer.daemon = True
        timer.start()
        found: deque[list[str]] = deque(maxlen=MOST_LINES)
        wanted, searched, matched = text.casefold(), 0, 0
        try:
            for line in reader.read(lines):
                searched += 1
                if wanted in line.text.casefold():
                    matched += 1
                    found.append([line.process, line.text[:LONGEST]])
        finally:
            timer.cancel()
            reader.close()
        problems = [f"host {host}: {problem}" for host, problem in reader.problems.items()]
        if late.is_set():
            problems.append(f"not everything was read within {LIMIT:.0f} s")
        return {"lines": list(found), "searched": searched, "matched": matched, "problems": problems[:MOST_PROCESSES]}


class EventReader:
    """Passes each event, with its process, to `on_event`, in a separate thread, until the job has ended or `close` is
    called. Lines that are not events are ignored.

    The use of each host is passed to `on_usage`. Lost hosts are reported to `note`, and retried while the job runs.

    over: no more events will arrive.
    complete: every host has sent all events.
    """

    def __init__(
        self, job: KnownJob, on_event: Callable[[str, Event], None], note: Callable[[str], None],
        on_usage: Callable[[str, HostUsage], None] = lambda host, usage: None,
    ) -> None:  # fmt: skip
        self.over = False
        self.complete = True
        self._on_event = on_event
        self._note = note
        self._reader = LogReader(job, job.plan.processes, note, events=True, on_usage=on_usage)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the connections to the hosts."""
        self._reader.close()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            for line in self._reader.follow():
                event = _event(line.text)
                if event is not None:
                    self._on_event(line.process, event)
            for host, problem in self._reader.problems.items():
                self.complete = False
                self._note(f"host {host}: {problem}")
        except Exception as error:  # for any error, the page must report that it is no longer updated
            self.complete = False
            self._note(f"no more events are read: {error}")
        finally:
            self.over = True


def _event(text: str) -> Event | None:
    try:
        return events.parse(decode(text))
    except ValueError:
        return None


MESSAGES = 200
MOST_HOSTS = 100
MOST_LINKS = 200
MOST_TEXT = 2000  # characters of a message
AHEAD = 600.0  # seconds that the time of an event may be ahead
MARGIN = 5.0  # seconds: largest expected delay of an event
MOST_REACHED = 256
ENDS = ("finished", "failed")
"""Final states of a process."""


@dataclass
class _Sender:
    """The state of one process.

    heard: time of the process's last event, by this machine's clock; 0 for never.
    counted: seconds of its newest byte count.
    rates: bytes per second that it sends to each process of other parties.
    reached: rounds, and when its telemetry first had them; the newest MOST_REACHED.
    """

    heard: float = 0.0
    counted: float = 0.0
    rates: Mapping[str, float] = field(default_factory=dict)
    reached: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MOST_REACHED))

    def reach(self, round_: int, seconds: float) -> None:
        """Note the round of its telemetry."""
        if not self.reached or round_ > self.reached[-1][0]:
            self.reached.append((round_, seconds))

    def time_of(self, round_: int, known: float) -> float:
        """Return when it had this round: at the latest at the time `known`, when something of the round was known."""
        return next((min(seconds, known) for number, seconds in self.reached if number >= round_), known)


class JobModel:
    """`take` adds an event, `snapshot` returns the current state. All methods are thread-safe.

    Times are seconds since the job `began` (Unix seconds), by the job's clock. `clock` is this clock.

    over: whether no process of the job runs any more.
    failed_first: the process whose failure ended the job, "" for none.
    """

    def __init__(self, plan: Plan, began: float, clock: Callable[[], float] = time.time) -> None:
        self.progress = Progress.of(plan, began, clock)
        self._silence = float(plan.spec.options["silence"]) + MARGIN
        self._senders = {name: _Sender() for name in self.progress.rows}
        self._last = 0.0
        self._curves = Curves([one.process for one in self.progress.training_rows])
        self._messages: deque[dict[str, Any]] = deque(maxlen=MESSAGES)
        self._usage: dict[str, HostUsage] = {}
        self._lock = threading.Lock()

    def take(self, process: str, event: Event) -> None:
        """Add an event of a process; events of unknown processes or from the future are ignored."""
        known = self.progress.rows.get(process)
        if known is None or event.time > time.time() + AHEAD:
            return
        with self._lock:
            seconds = max(0.0, event.time - self.progress.began)
            self._senders[process].heard = time.monotonic()
            self._last = max(self._last, seconds)
            before = known.traffic
            self.progress.apply(process, event, event.time)
            self._extend(known, event, seconds, before)

    def use(self, host: str, usage: HostUsage) -> None:
        """Note the newest CPU, memory and GPU use of a host."""
        with self._lock:
            self._usage[host] = usage

    def say(self, message: str) -> None:
        """Add a message of the dashboard itself."""
        with self._lock:
            self._messages.append(_message(self._last, "", "note", message))

    def snapshot(self, *, over: bool = False, failed_first: str = "") -> dict[str, Any]:
        """Return, for JSON, processes (if many, only the failed and lost ones), parties, curves, links, hosts and
        messages. Also the bytes before and after encoding by each option that names a codec.
        """
        with self._lock:
            rows = self.progress.rows
            states = self._states(over=over, failed_first=failed_first)
            shown = [name for name, state in states.items() if len(rows) <= MOST_ROWS or state in ("failed", "lost")]
            counted = self.progress.totals()
            return {
                "seconds": round(self._last, 1),
                "encoded": {"compress": counted.encoded, "compress-lan": counted.encoded_lan},
                "totals": totals(list(rows.values()), states),
                "processes": [row(rows[name], states[name]) for name in shown[:MOST_ROWS]],
                "parties": by_party(rows.values(), states),
                **self._curves.snapshot(),
                "links": self._links({name for name, state in states.items() if state not in (*ENDS, "ended", "lost")}),
                "hosts": self._hosts(),
                "messages": list(self._messages),
            }

    def overall(self) -> dict[str, Any]:
        """Return, for JSON, one curve of each kind for the whole job, and the seconds since it began."""
        with self._lock:
            return {"seconds": round(self._last, 1), **self._curves.overall()}

    def rows(self, party: str, first: int, *, over: bool = False, failed_first: str = "") -> dict[str, Any]:
        """Return, for JSON, at most 100 processes of a party from number `first` on, and how many it has."""
        with self._lock:
            states = self._states(over=over, failed_first=failed_first)
            found = [one for one in self.progress.rows.values() if one.process.party == party]
            shown = [row(one, states[one.process.name]) for one in found[first : first + MOST_ROWS]]
            return {"party": party, "first": first, "count": len(found), "rows": shown}

    def end(self) -> str:
        """Return the outcome of a job that was not followed to its end."""
        with self._lock:
            states = self._states(over=True, failed_first="")
            if "failed" in states.values():
                return "failed"
            done = all(states[one.process.name] in ENDS for one in self.progress.training_rows)
            return "done" if done else "ended before it was done"

    def _states(self, *, over: bool, failed_first: str) -> dict[str, str]:
        found = {name: self._state(one, over=over) for name, one in self.progress.rows.items()}
        if failed_first:  # the others ended as a consequence
            ended = {name for name, state in found.items() if state in ("failed", "ended")}
            found |= {name: "failed" if name == failed_first else "stopped" for name in ended}
        return found

    def _state(self, known: ProcessState, *, over: bool) -> str:
        state, heard = "failed" if known.failure else known.state, self._senders[known.process.name].heard
        silent = heard and time.monotonic() - heard > self._silence
        return state if state in ENDS or not (over or silent) else "ended" if over else "lost"

    def _extend(self, known: ProcessState, event: Event, seconds: float, before: Traffic) -> None:
        """Extend curves and messages by an event that is already applied to `known`. before: its bytes before the
        event.
        """
        name = known.process.name
        match event:
            case Telemetry():
                self._senders[name].reach(event.round, seconds)
                if known.trains:
                    self._curves.telemetry(name, event, seconds, trains=known.state == "training")
                if event.bytes is not None:
                    self._add_bytes(known, known.traffic, before, seconds)
            case Reported():
                self._curves.reported(name, event, seconds)
            case Evaluated() | ProcessFinished():
                if isinstance(event, Evaluated):  # arrives a few steps later, on a slow link many seconds
                    seconds = self._senders[name].time_of(event.round, seconds)
                self._curves.accuracy(known.process, event.accuracy, seconds)
                if event.validation_loss is not None:
                    self._curves.metric(name, VALIDATION_LOSS, event.validation_loss, seconds)
            case WarningRaised():
                self._messages.append(_message(seconds, name, "warning", event.message))
            case ProcessRestarted():
                self._messages.append(_message(seconds, name, "warning", event.message))
            case ProcessFailed():
                text = "; ".join(filter(None, (event.message, event.hint)))
                self._messages.append(_message(seconds, name, "failed", text))

    def _add_bytes(self, known: ProcessState, counts: Traffic, before: Traffic, seconds: float) -> None:
        sender = self._senders[known.process.name]
        begin = sender.counted or seconds  # all of the first count is shown at its time
        sent = {peer: max(0, pair[0] - before.peers.get(peer, (0, 0))[0]) for peer, pair in counts.peers.items()}
        if begin <= seconds:
            self._curves.sent(known.process.party, begin, seconds, sum(sent.values()))
        if begin < seconds:
            sender.rates = {peer: count / (seconds - begin) for peer, count in sent.items()}
        sender.counted = max(seconds, sender.counted)

    def _links(self, running: set[str]) -> list[dict[str, Any]]:
        """Return the current rate between each pair of parties, from the `running` processes, and the total. If pairs
        are very many, only those with the most bytes.
        """
        total: dict[tuple[str, str], list[float]] = {}
        rows = self.progress.rows
        for name, known in rows.items():
            for peer, (sent, _) in known.traffic.peers.items():
                other = rows.get(peer)
                if other is not None and other.process.party != known.process.party:
                    pair = total.setdefault((known.process.party, other.process.party), [0.0, 0.0])
                    pair[0] += sent
                    pair[1] += self._senders[name].rates.get(peer, 0.0) if name in running else 0.0
        most = sorted(total.items(), key=lambda item: -item[1][0])[:MOST_LINKS]
        return [
            {"from": sender, "to": receiver, "bytes": round(sent), "bytes_per_s": round(rate)}
            for (sender, receiver), (sent, rate) in sorted(most)
        ]

    def _hosts(self) -> list[dict[str, Any]]:
        """Return the use of each host. If hosts are very many, only the busiest ones."""
        busiest = sorted(self._usage.items(), key=lambda item: -item[1].cpu)[:MOST_HOSTS]
        return [{"name": name, **usage.to_json()} for name, usage in sorted(busiest)]


def _message(seconds: float, process: str, kind: str, text: str) -> dict[str, Any]:
    return {"seconds": round(seconds, 1), "process": process, "kind": kind, "text": plain(text)[:MOST_TEXT]}
