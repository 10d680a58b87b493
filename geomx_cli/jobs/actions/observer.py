"""The interface of what is shown of a running job elsewhere, such as an export of its metrics."""

from typing import Protocol

from geomx_cli.core.events import Event
from geomx_cli.jobs.view.progress import Progress

__all__ = ["Observer"]


class Observer(Protocol):
    """Sees a job's events until the job ends or is detached. Called in the main thread; must not block."""

    def open(self, progress: Progress) -> None:
        """Begin; `progress` is up to date whenever `on_event` is called. Raises GeomxError."""

    def on_event(self, process: str, event: Event) -> None:
        """Take an event of a process."""

    def close(self) -> None:
        """End; called also if `open` failed."""
