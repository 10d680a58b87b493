"""The output of one process among the progress that launch shows."""

import threading
import time
from collections import deque

from geomx_cli.core.errors import GeomxError
from geomx_cli.core.untrusted import first_line
from geomx_cli.jobs.actions.logs import LogReader
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.jobs.view.follow import View
from geomx_cli.plan import Plan, Process

__all__ = ["Tee", "rank_zero"]

_MOST = 200  # lines per update; further ones are counted
_ENDING = 5.0  # seconds for the last lines to arrive


def rank_zero(plan: Plan) -> Process:
    """The worker of global rank 0."""
    return next(process for process in plan.processes if process.global_rank == 0)


class Tee:
    """Prints the output of `process` in a view, each line after its name, as `geomx logs` does.

    The first `print_new` starts to read, as agents run by then. A host that is lost is reported, and read again as long
    as the job runs; errors never end the job.
    """

    def __init__(self, view: View, job: KnownJob, process: Process) -> None:
        self._view = view
        self._job = job
        self._process = process
        self._lines: deque[str] = deque()
        self._reader: LogReader | None = None
        self._thread: threading.Thread | None = None

    def print_new(self) -> None:
        """Print the lines that have come since the last call; of more than 200 the first and the last ones."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="tee", daemon=True)
            self._thread.start()
        count = len(self._lines)
        for number in range(count):
            line = self._lines.popleft()
            if number < _MOST // 2 or number >= count - _MOST // 2:
                self._view.note(line)
            elif number == _MOST // 2:
                self._view.note(f"{self._process.name} | ... {count - 2 * (_MOST // 2)} lines are in its log ...")

    def finish(self) -> None:
        """Print the last lines, within _ENDING seconds. The job has ended on the host of the process, its host was
        given up, or the launch fails.
        """
        if self._thread is not None:
            end = time.monotonic() + _ENDING
            self._thread.join(_ENDING)
            if self._reader is not None:  # a lost host may keep its connection from closing
                closing = threading.Thread(target=self._reader.close, name="tee end", daemon=True)
                closing.start()
                closing.join(max(0.0, end - time.monotonic()))
            self.print_new()

    def _read(self) -> None:
        try:
            self._reader = LogReader(self._job, [self._process], self._lines.append)
            for line in self._reader.follow():
                self._lines.append(f"{line.process} | {line.text}")
        except (GeomxError, OSError) as error:
            self._lines.append(f"the output of {self._process.name} cannot be read: {first_line(error)}")
