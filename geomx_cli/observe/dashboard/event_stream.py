"""The events of a job, read from its hosts over the same way as its logs, as they come."""

import threading
from collections.abc import Callable

from geomx_cli.core import events
from geomx_cli.core.events import Event
from geomx_cli.core.jsonlines import decode
from geomx_cli.jobs.actions.logs import LogReader
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["EventStream"]


class EventStream:
    """Gives each event, with its process, to `on_event`, in a thread of its own, until the job has ended or `close` is
    called. A line that is no event is passed over.

    What is lost is said to `note` and tried again while the job runs. `over`: there is nothing more to come;
    `complete`: every host has said all.
    """

    def __init__(self, job: KnownJob, on_event: Callable[[str, Event], None], note: Callable[[str], None]) -> None:
        self.over = False
        self.complete = True
        self._on_event = on_event
        self._note = note
        self._reader = LogReader(job, job.plan.processes, note, events=True)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Let go of the hosts."""
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
        except Exception as error:  # whatever it is, the page must say that it stands still
            self.complete = False
            self._note(f"no more events are read: {error}")
        finally:
            self.over = True


def _event(text: str) -> Event | None:
    try:
        return events.parse(decode(text))
    except ValueError:
        return None
