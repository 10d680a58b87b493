"""Reads the event log of a process of the job, as the process writes it."""

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.files import open_record
from geomx_cli.core.jsonlines import UNWRITTEN, decode, read_objects

__all__ = ["EventTail"]

_BEFORE = ("starting", "waiting")  # states of a process before all have joined
_SIGNALS = ("SIGTERM", "SIGUSR1")  # by which somebody asks the job to stop
_NEWEST = 1 << 18  # bytes of an event log
_SHOWN = 4096  # maximum characters of a string in a forwarded event


class EventTail:
    """Reads what a process adds to its event log, from `offset` on.

    failure: its own "failed" event, once read.
    saw_failure: it has noticed that the job has failed.
    joined, left: it has joined the job, and left it in the orderly way.
    finished: its last event was read; a scheduler or server has nothing more to do then.
    awaits_stop: it ends by itself once the job is asked to stop.
    signalled: the signal by which somebody else asks the job to stop, "" for none.
    waits: it waits for others to join, or has not come as far.
    heard: when its newest telemetry was read (time.monotonic seconds); it writes some every second.
    trains_since: when it first began to train, in any life, by the job's clock; 0 before.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.failure: dict[str, Any] | None = None
        self.saw_failure = self.joined = self.left = self.finished = self.awaits_stop = False
        self.signalled = ""
        self.waits = True
        self.heard = self.trains_since = 0.0
        self.path = path
        self._offset = offset
        self._saw_round = False

    def skip(self) -> None:
        """Begin with the newest events of a log that another agent has read, those of the last 256 KiB."""
        with suppress(OSError, CheckFailed), open_record(self.path) as file:
            size = os.fstat(file.fileno()).st_size
            self._offset = max(0, size - _NEWEST)
            if self._offset:
                file.seek(self._offset - 1)
                self._offset += len(file.readline()) - 1
        self._saw_round = self._offset > 0

    def successor(self) -> "EventTail":
        """Return one for the next life of the process, which goes on in the same file."""
        tail = EventTail(self.path, self._offset)
        tail._saw_round, tail.trains_since = self._saw_round, self.trains_since
        return tail

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

        Long strings are truncated, long lists and objects dropped.
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
                self.left = self.finished = True
            case "state", "failing":
                self.saw_failure = True
            case "stop_awaited", _:
                self.awaits_stop = True
            case "signalled", _:
                self.signalled = next((name for name in _SIGNALS if name == event.get("signal")), "a signal")
            case "state", "training" if not self.trains_since:
                self.trains_since = float(when) if isinstance(when := event.get("time"), int | float) else 0.0
            case "failed", _:
                self.failure = self.failure or event  # of a process's children the first


def _is_long(value: Any) -> bool:
    """Whether a field is too long to forward; it remains in the event log."""
    return isinstance(value, dict | list) and len(str(value)) > 16 * _SHOWN


def _shortened(value: Any) -> Any:
    """Truncate a long string for forwarding: event fields written by a script are untrusted."""
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]}... ({len(value)} characters; the event log has them)"
    return value
