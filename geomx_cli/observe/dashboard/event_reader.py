"""Reads a job's events from its hosts, over the same path as its logs."""

import threading
from collections.abc import Callable

from geomx_cli.core import events
from geomx_cli.core.agent_protocol import HostUsage
from geomx_cli.core.events import Event
from geomx_cli.core.jsonlines import decode
from geomx_cli.jobs.actions.logs import LogReader
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["EventReader"]


class EventReader:
    """Passes each event, with its process, to `on_event`, in a separate thread, until the job has ended or `close` is
    called. Lines that are not events are ignored.

    The use of each host is passed to `on_usage`. Lost hosts are reported to `note` and retried while the job runs.
    `over`: no more events will come; `complete`: every host has sent all events.
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
