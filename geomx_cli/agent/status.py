"""What an agent knows of its part of the job, in a file that a plain `cat` reads: `status.json`.

One line of JSON. Times are Unix seconds of this host; `uptime` counts since it was booted, so that a reader who
looks at /proc/uptime in the same breath sees how old the file is, whatever the clocks say.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.agent.child import Child
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.jsonlines import encode
from geomx_cli.core.root_cause import Failure

__all__ = ["FILE_NAME", "STATUS_VERSION", "StatusFile"]

STATUS_VERSION = 1
FILE_NAME = "status.json"
_EVERY = 1.0  # seconds
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "state": ("state",),
    "telemetry": ("state", "round", "samples_per_s", "loss", "accuracy", "progress", "left_s", "bytes"),
    "round": ("num_iters", "loss", "total_time", "samples", "accuracy"),
    "evaluation": ("round", "accuracy"),
    "finished": (),
}
"""Of which events the newest is kept, and which fields: all that the reducer reads."""
_FAILURES = 8  # of each host; the first are those that tell
_TEXT = 500  # characters of a text that a process has chosen


class StatusFile:
    """Keeps the newest of each process and writes it once a second, and soon after `change`. Used by one thread.

    Its size is bounded by the number of processes. A disk that is full is no reason to end a job: then the file
    grows old, its reader sees that, and the control machine gets one "warning" through `tell`.
    """

    def __init__(self, directory: Path, host_spec: HostSpec, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._warned = False
        self._path = directory / FILE_NAME
        self._host_spec = host_spec
        self._newest: dict[str, dict[str, dict[str, Any]]] = {task.name: {} for task in host_spec.tasks}
        self._failures: list[dict[str, Any]] = []
        self._next = 0.0

    def note(self, process: str, event: Mapping[str, Any]) -> None:
        """A process has written an event."""
        kind = event.get("event")
        if not isinstance(kind, str) or kind not in _FIELDS or not isinstance(event.get("time"), int | float):
            return
        names = ("schema_version", "number", "time", "event", *_FIELDS[kind])
        kept = {name: _bounded(event[name]) for name in names if name in event}
        self._newest[process][kind] = kept
        if kind == "state":
            self.change()
        if kind == "round":
            self._newest[process].setdefault("first round", kept)

    def fail(self, failure: Failure) -> None:
        """A process has failed; its time is that of this host."""
        if len(self._failures) < _FAILURES:
            fields = failure.to_message()
            self._failures.append({**fields, "tail": [line[:_TEXT] for line in failure.tail]})
        self.change()

    def change(self) -> None:
        """Something has changed that a reader wants to see soon."""
        self._next = 0.0

    def content(self, children: Iterable[Child], stage: str, **facts: Any) -> dict[str, Any]:
        """All that is known, as JSON can carry it. `facts` are the supervisor's own: why it stops, ..."""
        return {
            "schema_version": STATUS_VERSION,
            "job": self._host_spec.job,
            "host": self._host_spec.host,
            "time": time.time(),
            "uptime": processes.uptime(),
            "boot": processes.boot_id(),
            "agent": processes.identify(os.getpid()),
            "stage": stage,
            **facts,
            "processes": {child.name: _describe(child, self._newest[child.name]) for child in children},
            "failures": self._failures,
        }

    def due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() >= self._next

    def write(self, content: Mapping[str, Any]) -> None:
        """Replace status.json at once."""
        self._next = time.monotonic() + _EVERY
        try:
            write_atomic(self._path, encode(content))
        except OSError as error:
            if not self._warned:
                self._warned = True
                what = f"{self._path} cannot be written ({error.strerror}): geomx status shows outdated values"
                self._tell({"type": "warning", "message": what})


def _describe(child: Child, newest: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "pid": child.identity.pid if child.identity else 0,
        "state": "running" if child.running else "not started" if child.status is None else "ended",
        "status": child.status,
        "ended": child.ended,
        "asked": child.asked,
        "newest": dict(newest),
    }


def _bounded(value: Any) -> Any:
    """A value as a script may have chosen it: numbers and short texts, one level deep."""
    if isinstance(value, dict):
        flat = [(name, item) for name, item in value.items() if not isinstance(item, dict)]
        return {str(name)[:_TEXT]: _bounded(item) for name, item in flat[:8]}
    if isinstance(value, list | tuple):
        return [item for item in value[:8] if isinstance(item, int | float)]
    return value[:_TEXT] if isinstance(value, str) else value
