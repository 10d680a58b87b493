"""Telemetry of a script's worker that is no member of a plane."""

import threading
from collections.abc import Callable

from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import Telemetry

__all__ = ["Pulse"]

_PERIOD = 1.0


class Pulse:
    """Writes the number of rounds once per second, in a thread of its own, as members of a plane do."""

    def __init__(self, events: EventLog, rounds: Callable[[], int]) -> None:
        self._events = events
        self._rounds = rounds
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="geomx-pulse", daemon=True).start()

    def stop(self) -> None:
        """Write the last number, and stop."""
        self._ended.set()
        self._write()

    def _run(self) -> None:
        while not self._ended.wait(_PERIOD):
            self._write()

    def _write(self) -> None:
        self._events.write(Telemetry(state="training", round=self._rounds()))
