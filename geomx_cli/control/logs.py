"""The output of a job's processes, as their hosts have it: some of them or all, to its end or as it comes."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import Queue

import msgspec

from geomx_cli.errors import CheckFailed, GeomxError, UsageError
from geomx_cli.host_words import decode, first_line, last_line
from geomx_cli.hosts import Channel, Host, everywhere
from geomx_cli.job.known import KnownJob
from geomx_cli.lines import lines as whole_lines
from geomx_cli.plan import Plan, Process

__all__ = ["Line", "LogReader", "select"]

_AHEAD = 4096  # lines that are read before they are taken


class _Said(msgspec.Struct):
    """One line of what agent/tail.py prints."""

    process: str = ""
    line: str = ""
    end: bool = False


@dataclass(frozen=True)
class Line:
    """One line of a process's output, without its end and without what would do a terminal harm."""

    process: str
    text: str


def select(plan: Plan, party: str = "", role: str = "", rank: int | None = None) -> list[Process]:
    """The processes that match. `role` may be written "global server" or "global-server". Raises UsageError, naming
    what there is, when none does.
    """
    role = role.replace("-", "_").replace(" ", "_")
    found = [
        process
        for process in plan.processes
        if party in ("", process.party) and role in ("", process.role) and rank in (None, process.rank)
    ]
    if not found:
        known = ", ".join(process.name for process in plan.processes)
        raise UsageError("no process matches --party, --role and --rank", f"there are {known}")
    return found


class LogReader:
    """Reads from the hosts of some processes. `problems` has, after reading, the hosts that failed and why.

    One thread reads; `close` may be called by any and ends it.
    """

    def __init__(self, job: KnownJob, processes: Sequence[Process]) -> None:
        self.problems: dict[str, str] = {}
        self._job = job
        self._names: dict[str, list[str]] = {}
        for process in processes:
            self._names.setdefault(process.host, []).append(process.name)
        self._hosts = job.open_hosts(self._names)
        self._channels: dict[str, Channel] = {}

    def read(self, lines: int = -1) -> Iterator[Line]:
        """What is there now, host by host in the plan's order; of each process the last `lines`, -1: all."""
        self._open(["--lines", str(lines)])
        for host, channel in self._channels.items():
            yield from self._receive(host, channel)

    def follow(self, lines: int = -1) -> Iterator[Line]:
        """The same, then what comes, until the job has ended on all these hosts."""
        self._open(["--follow", "--lines", str(lines)])
        arrived: Queue[Line | None] = Queue(_AHEAD)

        def receive(host: str, channel: Channel) -> None:
            try:
                for line in self._receive(host, channel):
                    arrived.put(line)
            finally:
                arrived.put(None)

        threads = [
            threading.Thread(target=receive, args=entry, name=f"log {entry[0]}", daemon=True)
            for entry in self._channels.items()
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
        """Let go of the hosts."""
        for channel in self._channels.values():
            channel.close()
        everywhere(lambda host: host.close(), self._hosts.values())

    def _open(self, options: Sequence[str]) -> None:
        def begin(host: Host) -> tuple[str, Channel] | None:
            directory = self._job.directory_on(host.name)
            argv = [host.python, "-m", "geomx_cli.agent", "tail", directory, *options, *self._names[host.name]]
            try:
                return host.name, host.open(argv)
            except (GeomxError, OSError) as error:
                self.problems[host.name] = first_line(error)
                return None

        self._channels = dict(filter(None, everywhere(begin, self._hosts.values())))

    def _receive(self, host: str, channel: Channel) -> Iterator[Line]:
        ended = False
        try:
            for data in whole_lines(channel.receive, "it"):
                if not data.startswith(b"{"):  # a login shell may have greeted
                    continue
                said = decode(data, _Said)
                ended |= said.end
                if not said.end and said.process not in self._names[host]:
                    raise ValueError("a line of another host's process")
                if not said.end:
                    yield Line(said.process, said.line.replace("\n", " "))
        except (CheckFailed, ValueError) as error:
            self.problems[host] = f"what it sends is damaged: {first_line(error)}"
            channel.close()
            return
        if not ended:
            self.problems[host] = last_line(channel.errors(), "the connection broke")
