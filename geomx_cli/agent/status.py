"""The agent's status file, `status.json`: what it knows of its part of the job, readable with a plain `cat`.

One line of JSON. Times are those of JobClock. `uptime` counts seconds since boot, so that a reader who reads
/proc/uptime with the file can compute the file's age independently of clocks.
"""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.agent.child import Child
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.agent_status import MAX_METRICS, AgentStatus, ProcessStatus
from geomx_cli.core.conventions import JobClock, life_of
from geomx_cli.core.files import write_atomic
from geomx_cli.core.jsonlines import encode
from geomx_cli.core.root_cause import Failure, FailureFields

__all__ = ["FILE_NAME", "HostUsageMeter", "StatusFile", "parse_cpu", "parse_gpus", "parse_memory"]

# CPU, memory and GPU use of this host, from /proc and nvidia-smi.

_USAGE_EVERY, _FIRST = 10.0, 2.0  # seconds
_GPU_LIMIT = 10.0  # seconds
_GPU_TRIES = 3
_MOST_GPUS = 16
_MOST_NAME = 80
_QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


class HostUsageMeter:
    """Measures every 10 s and never waits: nvidia-smi, where there is one, runs beside the agent; after 3 failures in a
    row it is not started again. What cannot be read is left out.
    """

    def __init__(self, clock: JobClock) -> None:
        self._clock = clock
        self.newest: dict[str, Any] = {}
        self._machine = processes.boot_id()
        self._next = 0.0
        self._before = (0, 0)
        self._peak = 0
        self._program = shutil.which("nvidia-smi")
        self._query: subprocess.Popen[str] | None = None
        self._deadline = 0.0
        self._failures = 0
        self._gpus: list[dict[str, Any]] = []

    def measure(self, now: float) -> None:
        """Measure if it is time to; `now` is monotonic."""
        if self._query is not None:
            self._finish_query(now)
        if now < self._next:
            return
        self._next = now + (_USAGE_EVERY if self._before[1] else _FIRST)
        with suppress(OSError, ValueError, IndexError, KeyError):
            before, counted = self._before, parse_cpu(Path("/proc/stat").read_text())
            self._before = counted
            if not before[1]:  # the counts are since boot
                return
            busy, total = counted[0] - before[0], counted[1] - before[1]
            memory = parse_memory(Path("/proc/meminfo").read_text())
            self._peak = max(self._peak, memory[0])
            share = min(1.0, max(0.0, busy / total)) if total > 0 else 0.0
            self.newest = {
                "time": self._clock.time(), "machine": self._machine, "cpu": round(share, 3),
                "cores": os.cpu_count() or 1, "memory": list(memory), "peak": self._peak, "gpus": self._gpus,
            }  # fmt: skip
        self._begin_query(now)

    def close(self) -> None:
        """End a running nvidia-smi."""
        if self._query is not None:
            self._query.kill()
            self._query.communicate()
            self._query = None

    def _begin_query(self, now: float) -> None:
        if self._program is None or self._query is not None or self._failures >= _GPU_TRIES:
            return
        try:
            self._query = subprocess.Popen(
                [self._program, *_QUERY], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, errors="replace",
            )  # fmt: skip
        except OSError:
            self._failures += 1
        self._deadline = now + _GPU_LIMIT

    def _finish_query(self, now: float) -> None:
        assert self._query is not None
        if self._query.poll() is None and now < self._deadline:
            return
        self._query.kill()  # no effect if it has ended
        output, _ = self._query.communicate()
        self._failures = self._failures + 1 if self._query.returncode else 0
        self._gpus = [] if self._query.returncode else parse_gpus(output)
        self._query = None


def parse_cpu(stat: str) -> tuple[int, int]:
    """Return the ticks in which all CPUs were busy, and all ticks, from /proc/stat."""
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1:9]]  # guests are contained in user and nice
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def parse_memory(meminfo: str) -> tuple[int, int]:
    """Return the bytes in use and the bytes installed, from /proc/meminfo."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    free, total = (int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    return total - free, total


def parse_gpus(output: str) -> list[dict[str, Any]]:
    """Return name, busy fraction (None if the GPU does not tell it) and bytes of memory of each GPU, from nvidia-smi's
    lines.
    """
    found = []
    for line in output.splitlines()[:_MOST_GPUS]:
        name, *numbers = (word.strip() for word in line.rsplit(",", 3))
        if len(numbers) == 3:
            busy, used, total = (int(word) if word.isdigit() else None for word in numbers)
            share = None if busy is None else min(1.0, busy / 100)
            memory = [(used or 0) << 20, (total or 0) << 20]
            found.append({"name": name[:_MOST_NAME], "busy": share, "memory": memory})
    return found


_SCHEMA_VERSION = 1
FILE_NAME = "status.json"
_EVERY = 1.0  # seconds
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "state": ("state",),
    "telemetry": (
        "state", "round", "samples_per_s", "loss", "accuracy", "progress", "left_s", "awaited", "left_out", "bytes"
    ),
    "round": ("num_iters", "loss", "total_time", "samples", "accuracy"),
    "reported": ("step", "total_time", "samples", "samples_per_s", "loss", "accuracy", "metrics"),
    "evaluation": ("round", "accuracy", "validation_loss"),
    "finished": ("contribution", "place", "samples", "stopped"),
    "outputs": ("files", "count", "bytes"),
    "warning": ("message", "affects_result"),
    "restarted": ("incarnation", "together", "message"),
    "left": ("incarnation", "round", "message"),
}
"""Event kinds of which the newest is kept, of warnings the first, and the fields kept: all that the reducer reads."""
_FAILURES = 8  # per host; the first ones are the most informative
_TEXT = 500  # maximum characters of a string chosen by a process


class StatusFile:
    """Keeps the newest events of each process and writes them once a second, and at once after `write_soon`. Not
    thread-safe.

    Its size is bounded by the number of processes. A full disk does not end the job: the file becomes stale, which
    its reader detects, and the control machine gets a "warning" through `warn`, and another when there is room again.
    """

    def __init__(
        self, directory: Path, host_spec: HostSpec, clock: JobClock, warn: Callable[[dict[str, Any]], None]
    ) -> None:
        self._clock = clock
        self._warn = warn
        self._warned = False
        self._path = directory / FILE_NAME
        self._host_spec = host_spec
        self._newest: dict[str, dict[str, dict[str, Any]]] = {task.name: {} for task in host_spec.tasks}
        self._failures: list[FailureFields] = []
        self._next = 0.0
        self.usage = HostUsageMeter(clock)

    def recall(self) -> None:
        """Go on from the file that a killed agent has left, if it can be read."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(self._path.read_bytes())["processes"]
            self._newest = {name: dict(found[name]["newest"]) for name in self._newest}

    def record_event(self, process: str, event: Mapping[str, Any]) -> None:
        """Record an event of a process."""
        kind = event.get("event")
        if not isinstance(kind, str) or kind not in _FIELDS or not isinstance(event.get("time"), int | float):
            return
        if kind == "warning" and (event.get("affects_result") is not True or kind in self._newest[process]):
            return  # the first warning that affects the result is kept
        names = ("schema_version", "number", "time", "event", *_FIELDS[kind])
        kept = {name: _bounded(event[name]) for name in names if name in event}
        if kind == "reported":
            kept = _merged(self._newest[process].get(kind, {}), kept)
        self._newest[process][kind] = kept
        if kind == "state":
            self.write_soon()
        if kind == "round":
            self._newest[process].setdefault("first round", kept)

    def begin_life(self, process: str) -> None:
        """Keep the progress and the bytes of a life that has ended. The bytes of the next life are added to them."""
        newest = self._newest[process]
        if (last := newest.get("telemetry")) is not None:
            names = ("schema_version", "number", "time", "event", "round", "bytes")
            life = life_of(number) if isinstance(number := last.get("number"), int) else 0
            newest[f"telemetry {life}"] = {name: last[name] for name in names if name in last}

    def begin_again(self) -> None:
        """All processes begin again: failures so far are history."""
        self._failures = []
        self.write_soon()

    def record_failure(self, failure: Failure) -> None:
        """Record a failure of a process; its time is by the job's clock."""
        if len(self._failures) < _FAILURES:
            short = replace(failure, tail=[line[:_TEXT] for line in failure.tail])
            self._failures.append(short.to_message())
        self.write_soon()

    def write_soon(self) -> None:
        """Schedule a write without delay."""
        self._next = 0.0

    def content(
        self, children: Iterable[Child], *, stage: str, why: str, asked: str, ordered: bool, left: list[str]
    ) -> AgentStatus:
        """Return the whole status; see AgentStatus for the fields."""
        me = processes.identify(os.getpid())
        assert me is not None
        return {
            "schema_version": _SCHEMA_VERSION,
            "job": self._host_spec.job,
            "host": self._host_spec.host,
            "time": self._clock.time(),
            "uptime": processes.uptime(),
            "boot": processes.boot_id(),
            "machine": os.uname().nodename,
            "agent": me,
            "stage": stage,
            "why": why,
            "asked": asked,
            "ordered": ordered,
            "left": left,
            "processes": {child.name: _describe(child, self._newest[child.name]) for child in children},
            "failures": self._failures,
            "usage": self.usage.newest,
        }

    def due(self) -> bool:
        """Whether the next write is due."""
        return time.monotonic() >= self._next

    def write(self, content: AgentStatus) -> None:
        """Replace status.json atomically."""
        self._next = time.monotonic() + _EVERY
        try:
            write_atomic(self._path, encode(content))
        except OSError as error:
            if not self._warned:
                what = f"{self._path} cannot be written ({error.strerror}): progress and geomx status may be outdated"
                self._warn({"type": "warning", "message": what})
            self._warned = True
        else:
            if self._warned:
                self._warn({"type": "warning", "message": f"{self._path} is written again"})
            self._warned = False


def _describe(child: Child, newest: Mapping[str, dict[str, Any]]) -> ProcessStatus:
    return {
        "pid": child.life.identity.pid if child.life.identity else 0,
        "state": "running" if child.life.running else "not started" if child.life.status is None else "ended",
        "status": child.life.status,
        "ended": child.life.ended,
        "asked": child.asked,
        "newest": dict(newest),
    }


def _merged(before: Mapping[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the values of earlier ones that it does not have itself."""
    old, new = (one["metrics"] if isinstance(one.get("metrics"), dict) else {} for one in (before, kept))
    return {**before, **kept, "metrics": dict(list({**old, **new}.items())[:MAX_METRICS])}


def _bounded(value: Any) -> Any:
    """Bound a value chosen by a script: numbers and short strings, one level deep."""
    if isinstance(value, dict):
        flat = [(name, item) for name, item in value.items() if not isinstance(item, dict)]
        return {str(name)[:_TEXT]: _bounded(item) for name, item in flat[:MAX_METRICS]}
    if isinstance(value, list | tuple):
        return [item for item in value[:8] if isinstance(item, int | float)]
    return value[:_TEXT] if isinstance(value, str) else value
