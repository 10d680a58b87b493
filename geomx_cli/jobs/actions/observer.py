"""The interface of what is shown of a running job elsewhere, such as an export of its metrics."""

from collections.abc import Mapping
from typing import Protocol

from geomx_cli.core.events import Event
from geomx_cli.core.options import Value
from geomx_cli.jobs.view.progress import Progress

__all__ = ["Observer"]


class Observer(Protocol):
    """Sees a job's events until the job ends or is detached. Called in the main thread; must not block."""

    def open(self, progress: Progress, options: Mapping[str, Value]) -> None:
        """Begin; `progress` is up to date whenever `on_event` is called, `options` has all of the job's. Raises
        GeomxError.
        """

    def on_event(self, process: str, event: Event) -> None:
        """Take an event of a process."""

    def close(self, status: str) -> None:
        """End; called also if `open` failed. status: see Outcome; "" for a job that did not start or was detached."""
