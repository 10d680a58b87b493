"""The event log of a process of the job, as its agent reads and forwards it."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from geomx_cli.core.jsonlines import UNWRITTEN, decode, read_objects

__all__ = ["EventTail"]

_BEFORE = ("starting", "waiting")  # states of a process before all have joined
_SHOWN = 4096  # maximum characters of a string in a forwarded event


class EventTail:
    """Reads what has been added to the log. `failure`: the process's own "failed" event, once read; `saw_failure`:
    the process has noticed that the job has failed. joined, left: whether it has joined the job, and left it in the
    orderly way. `waits`: it waits for others to join, or has not come as far. `heard`: when its newest telemetry was
    read (time.monotonic seconds), which it writes every second in between.
    """

    def __init__(self, path: Path) -> None:
        self.failure: dict[str, Any] | None = None
        self.saw_failure = self.joined = self.left = False
        self.waits = True
        self.heard = 0.0
        self.path = path
        self._offset = 0
        self._saw_round = False
        self._samples = 0

    def unwritten(self, output: Iterable[str]) -> list[dict[str, Any]]:
        """Return the events in a process's output for which its event log had no room."""
        events = []
        for line in output:
            if line.startswith(UNWRITTEN):
                with suppress(ValueError):
                    events.append({name: _shortened(value) for name, value in decode(line[len(UNWRITTEN) :]).items()})
                    self._note(events[-1])
        return events

    def read(self) -> list[dict[str, Any]]:
        """Return the events written since the last call; of its round events only the very first and the newest,
        of reports those that are live, and no counts of sent bytes.

        Round events get the field "samples", summed over all rounds so far. Long strings are truncated, long lists
        and objects dropped.
        """
        if not self.path.is_file():  # not created yet, or replaced by a pipe
            return []
        events: list[dict[str, Any]] = []
        newest: dict[str, Any] | None = None
        for written, offset in read_objects(self.path, self._offset):
            self._offset = offset
            event = {name: _shortened(value) for name, value in written.items() if not _is_long(value)}
            kind = event.get("event")
            if kind == "round":
                event["samples"] = self._samples = self._samples + _count(event.get("num_samples"))
                if self._saw_round:
                    newest = event
                    continue
                self._saw_round = True
            if kind == "sent" or (kind == "reported" and not event.get("live")):
                continue
            self._note(event)
            events.append(event)
        return events if newest is None else [*events, newest]

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("event"), event.get("state"):
            case "telemetry", state:
                self.joined, self.heard = True, time.monotonic()
                self.waits = state in _BEFORE
                self.left |= state == "finished"
            case "finished", _:
                self.left = True
            case "state", "failing":
                self.saw_failure = True
            case "failed", _:
                self.failure = self.failure or event  # of a process's children the first


def _count(value: Any) -> int:
    """Return `value` if it is a positive int, else 0: event fields written by a script are untrusted."""
    return value if isinstance(value, int) and value > 0 else 0


def _is_long(value: Any) -> bool:
    """Whether a field is too long to forward; it remains in the event log."""
    return isinstance(value, dict | list) and len(str(value)) > 16 * _SHOWN


def _shortened(value: Any) -> Any:
    """Truncate a long string for forwarding: event fields written by a script are untrusted."""
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}... ({len(value)} characters; the event log has them)"
    return value
