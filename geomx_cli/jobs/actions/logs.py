"""The output or event logs of a job's processes, read from their hosts once or followed."""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from geomx_cli.core.agent_protocol import HostUsage
from geomx_cli.core.errors import CheckFailed, GeomxError, UsageError
from geomx_cli.core.option import nearest
from geomx_cli.core.untrusted import convert, decode, first_line
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.actions.streams import HostStream
from geomx_cli.jobs.store.job_state import JobState
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.plan import Plan, Process

__all__ = ["Line", "LogReader", "select"]

_AHEAD = 4096  # lines read ahead of the consumer
_MOST_PROBLEMS = 8  # problems reported per host
_AGAIN = (0.5, 1.0, 2.0, 4.0, 8.0)  # retry backoff in seconds; the last value repeats


class _TailMessage(msgspec.Struct):
    """A message of agent/tail.py: a line, the place of the following lines in the log, why a log is left out, the use
    of the host, or the end, and whether the agent had started.
    """

    process: str = ""
    line: str = ""
    next: Annotated[str, Meta(pattern="^([0-9]{1,18}:[0-9a-f]{0,16})?$")] = ""
    problem: str = ""
    usage: Any = None
    end: bool = False
    started: bool = True


@dataclass(frozen=True)
class Line:
    """One line of a process's output, without its line end and terminal control characters."""

    process: str
    text: str


def select(
    plan: Plan, party: str = "", host: str = "", role: str = "", rank: int | None = None
) -> list[Process]:
    """Return the matching processes. `role` accepts "global server" and "global-server". Raises UsageError, listing the
    valid choices, if none match.
    """
    role = role.replace("-", "_").replace(" ", "_")
    for what, word in (("party", party), ("host", host), ("role", role)):
        known = sorted({getattr(process, what) for process in plan.processes})
        if word and word not in known:
            raise UsageError(f"there is no {what} {word!r} in job {plan.job}", nearest(word, known))
    found = [
        process
        for process in plan.processes
        if party in ("", process.party) and host in ("", process.host) and role in ("", process.role)
        if rank in (None, process.rank)
    ]
    if not found:
        names = ", ".join(process.name for process in plan.processes)
        raise UsageError("no process matches --party, --host, --role and --rank", f"there are {names}")
    return found


class LogReader:
    """Reads from the hosts of the given processes. After reading, `problems` has the failed hosts and the reasons.

    One thread reads; any thread may call `close`, which ends it.

    notify: called, from any thread, when a followed host is lost and when it is back.
    events: the lines are those of the event logs, except events of single rounds.
    on_usage: with `events`, called by any thread with a host's name and its CPU, memory and GPU use.
    hosts: by name, to be used and left open; else it opens and closes its own.
    """

    def __init__(
        self,
        job: KnownJob,
        processes: Sequence[Process],
        notify: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
        *,
        events: bool = False,
        on_usage: Callable[[str, HostUsage], None] = lambda host, usage: None,
        hosts: Mapping[str, Connector] | None = None,
    ) -> None:
        self._job = job
        self._options = ["--events"] if events else []
        names: dict[str, list[str]] = {}
        for process in processes:
            names.setdefault(process.host, []).append(process.name)
        self._closing = threading.Event()
        self._own_hosts = job.open_hosts(names) if hosts is None else {}
        used = self._own_hosts if hosts is None else {name: hosts[name] for name in names}
        self._sources = [
            _Source(host, job.directory_on(name), names[name], notify, on_usage) for name, host in used.items()
        ]

    @property
    def problems(self) -> dict[str, str]:
        """Host -> error."""
        return {source.host.name: source.problem for source in self._sources if source.problem}

    def read(self, lines: int = -1) -> Iterator[Line]:
        """Yield the current lines, host by host in the plan's order; of each process the last `lines` (-1: all)."""
        opened = everywhere(lambda source: source.open([*self._options, "--lines", str(lines)]), self._sources)
        for source, is_open in zip(self._sources, opened, strict=True):
            if is_open:
                yield from source.receive()

    def follow(self, lines: int = -1) -> Iterator[Line]:
        """Like `read`, then yield new lines until the job has ended on all these hosts. A lost host is retried, and
        resumes at its last position, as long as the job is not known to have ended.
        """
        arrived: Queue[Line | None] = Queue(_AHEAD)

        options = [*self._options, "--follow", "--lines", str(lines)]

        def receive(source: _Source) -> None:
            try:
                for line in source.follow(options, self._runs, self._closing):
                    arrived.put(line)
            except Exception as error:  # for any error, the reader must say that lines are missing
                source.fail(f"its lines are read no longer: {first_line(error)}")
            finally:
                arrived.put(None)

        threads = [
            threading.Thread(target=receive, args=(source,), name=f"log {source.host.name}", daemon=True)
            for source in self._sources
        ]
        for thread in threads:
            thread.start()
        open_ = len(threads)
        while open_:
            line = arrived.get()
            if line is None:
                open_ -= 1
            else:
                yield line

    def close(self) -> None:
        """End reading, and close the connections to the hosts, unless they were given."""
        self._closing.set()
        for source in self._sources:
            source.close()
        everywhere(lambda host: host.close(), self._own_hosts.values())

    def _runs(self) -> bool:
        state = JobState.read(self._job.directory)
        return state is not None and state.shown in ("running", "detached")


class _Source:
    """The lines of one host, each exactly once across reconnects."""

    def __init__(
        self, host: Connector, directory: str, names: Sequence[str],
        notify: Callable[[str], None], on_usage: Callable[[str, HostUsage], None],
    ) -> None:  # fmt: skip
        self.host = host
        self._directory = directory
        self._names = names
        self._notify = notify
        self._on_usage = on_usage
        self._stream: HostStream | None = None
        self._over = False  # ended, or sent malformed data
        self._started = True  # the agent, when its lines ended
        self._lost = ""  # why the stream is lost
        self._reported = ""  # the loss already reported
        self._left_out: list[str] = []
        self._next: dict[str, str] = {}  # process -> place in its log at the start of a line,
        self._since: Counter[str] = Counter()  # lines received since then,
        self._known: Counter[str] = Counter()  # and how many of the next lines are repeats

    @property
    def problem(self) -> str:
        """The error; "" if there is none."""
        return ", ".join([*self._left_out[:_MOST_PROBLEMS], *filter(None, [self._lost])])

    def open(self, options: Sequence[str]) -> bool:
        """Request lines, resuming after those already received. Return False if the host cannot be reached."""
        self._known += self._since
        self._since.clear()
        self._started = True
        self.close()
        begin = [f"--begin={name}={place}" for name, place in self._next.items()]
        try:
            self._stream = HostStream(self.host, "tail", self._directory, *options, *begin, *self._names)
        except (GeomxError, OSError) as error:
            self._lost = first_line(error, self.host.name)
            return False
        return True

    def fail(self, problem: str) -> None:
        """Note why nothing more is read."""
        self._over, self._lost = True, problem

    def close(self) -> None:
        """Close the stream and its reader."""
        if self._stream is not None:
            self._stream.close()

    def follow(
        self, options: Sequence[str], runs: Callable[[], bool], closing: threading.Event
    ) -> Iterator[Line]:
        """Yield lines until there are no more, or until the host is lost and the job has ended."""
        attempts = 0
        while not closing.is_set():
            again = runs()  # before reading: if the job has ended by now, everything is read
            if self.open(options):
                yield from self.receive()
            if not self._started:  # the job has just begun
                self._over = not again
            if self._over or not again or closing.is_set():
                return
            if self._started and self._lost != self._reported:
                attempts = attempts if self._reported else 0
                self._reported = self._lost
                self._notify(f"host {self.host.name}: {self._lost}; trying again while the job runs")
            closing.wait(_AGAIN[min(attempts, len(_AGAIN) - 1)])
            attempts += 1

    def receive(self) -> Iterator[Line]:
        """Yield lines until the connection ends."""
        assert self._stream is not None
        try:
            for data in self._stream.objects("it"):
                yield from self._handle(decode(data, _TailMessage))
        except (CheckFailed, ValueError) as error:
            self.fail(f"what it sends is damaged: {first_line(error)}")
            self._stream.close()
            return
        if not self._over:
            self._lost = self._stream.errors("the connection broke")

    def _handle(self, message: _TailMessage) -> Iterator[Line]:
        """Process one message; yield its line if it is new. Raises ValueError for a process of another host."""
        name, problem = message.process, message.problem.replace("\n", " ")
        self._over |= message.end
        self._started = message.started
        if message.usage is not None:
            self._report_usage(message.usage)
        elif message.problem or message.end:
            self._left_out += [problem] if problem and problem not in self._left_out else []
        elif name not in self._names:
            raise ValueError("a line of another host's process")
        elif message.next:
            self._next[name] = message.next
            del self._since[name]
        else:
            self._since[name] += 1
            if self._known[name] == 0:
                yield Line(name, message.line.replace("\n", " "))
            self._known[name] -= self._known[name] > 0
        self._lost = ""
        if self._reported:
            self._reported = ""
            self._notify(f"host {self.host.name} is connected again; resuming its log")

    def _report_usage(self, found: Any) -> None:
        """Pass it on, unless it makes no sense; its lines are read nevertheless."""
        try:
            usage = convert(found, HostUsage)
        except ValueError:
            return
        self._on_usage(self.host.name, usage)
