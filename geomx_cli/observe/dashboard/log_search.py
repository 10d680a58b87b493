"""The page's log viewer: the end of the logs of a job's processes, or their lines with a given text."""

import threading
from collections import deque
from typing import Any

from geomx_cli.core.errors import CheckFailed
from geomx_cli.hosts import Connector, everywhere
from geomx_cli.jobs.actions.logs import LogReader
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["LogSearch"]

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
