"""The event log: what one process has to say, as JSON lines, one event a line, each of a kind with typed fields.

Every line carries `schema_version`, `number` (1, 2, ...), `time` (Unix seconds), `party`, `role`, `rank` and `event`,
the kind; the rest are the kind's own fields. Status, summaries, figures and the live view read nothing else.

A later version may add kinds and fields, which earlier ones pass over. The schema's version grows when a field changes
its meaning; events of a larger one are passed over too.
"""

import contextlib
import errno
import itertools
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import msgspec
from msgspec import Meta

from geomx_cli.core.jsonlines import encode

__all__ = [
    "MAX_COUNT",
    "MAX_SECONDS",
    "SCHEMA_VERSION",
    "Evaluated",
    "Event",
    "EventLog",
    "ProcessFailed",
    "ProcessFinished",
    "RosterComplete",
    "RoundCompleted",
    "StateChanged",
    "Telemetry",
    "Traffic",
    "WarningRaised",
    "parse",
]

SCHEMA_VERSION = 1
MAX_SECONDS = 1e10
MAX_COUNT = 1 << 53

Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]
Seconds = Annotated[float, Meta(ge=0, lt=MAX_SECONDS)]
Rate = Annotated[float, Meta(ge=0, lt=1e18)]
Share = Annotated[float, Meta(ge=0, le=1)]
Step = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
Pair = tuple[Count, Count]


class Traffic(msgspec.Struct):
    """Bytes of messages (sent, received) so far: inside the party, to other parties, and by peer. encoded: bytes before
    and after encoding.
    """

    lan: Pair = (0, 0)
    wan: Pair = (0, 0)
    peers: dict[str, Pair] = {}
    encoded: Pair = (0, 0)


class Event(msgspec.Struct, tag_field="event", kw_only=True, omit_defaults=True):
    """What all kinds have, set when it is written. `time`: Unix seconds by the clock of the process's host."""

    time: Seconds = 0.0
    number: Count = 0

    @property
    def order(self) -> tuple[int, float]:
        """Orders the events of one process, though the clock of its host may have been set back."""
        return self.number, self.time


class StateChanged(Event, tag="state"):
    """The process is in another state: "waiting", "training", "serving", "finished"."""

    state: str
    message: str = ""


class Telemetry(Event, tag="telemetry"):
    """The newest figures, once a second.

    waiting: the part of its time that a worker waits for others. progress: the part of the training that is done.
    left_s: seconds until it is. refused: messages that were dropped, by reason. versions: rounds of each party that an
    asynchronous root has applied.
    """

    state: str = ""
    round: Count = 0
    samples_per_s: Rate | None = None
    loss: float | None = None
    accuracy: Share | None = None
    waiting: Share | None = None
    progress: Share | None = None
    left_s: Seconds | None = None
    bytes: Traffic | None = None
    refused: dict[str, Count] = {}
    versions: dict[str, Count] = {}


class RoundCompleted(Event, tag="round"):
    """A worker's record of a round. times: seconds by phase of each local step. total_time: seconds since training
    began. communicate, wait: seconds that the exchange was under way, and that the worker had nothing else to do.

    recorded: the algorithm's own figures. samples: those of all rounds so far, added by the agent, which does not pass
    all rounds on.
    """

    num_iters: Count
    total_time: Seconds
    num_samples: Count = 0
    times: dict[Step, dict[str, Seconds]] = {}
    bytes_sent: Count = 0
    bytes_received: Count = 0
    compute: Seconds | None = None
    communicate: Seconds | None = None
    wait: Seconds | None = None
    loss: float | None = None
    accuracy: Share | None = None
    recorded: dict[str, float] = {}
    samples: Count = 0


class Evaluated(Event, tag="evaluation"):
    """The weights after `round` have this test accuracy. seconds: what finding that took."""

    round: Count
    accuracy: Share
    seconds: Seconds = 0.0


class WarningRaised(Event, tag="warning"):
    """Something that a user should know of, and the job goes on. reason: in a word, for refused messages."""

    message: str
    reason: str = ""


class RosterComplete(Event, tag="roster"):
    """All members of a scheduler's plane have joined."""

    members: list[dict[str, Any]] = []
    message: str = ""


class ProcessFailed(Event, tag="failed"):
    """The process ends because of this. peer: whose fault it is, if another's."""

    message: str
    hint: str = ""
    peer: str = ""


class ProcessFinished(Event, tag="finished"):
    """The process has done its part. What follows only workers of the bundled training say: rounds, samples, seconds of
    training; why it ended ("epochs", "time", ...); the digest of the weights; their test accuracy, on one worker.
    """

    rounds: Count | None = None
    samples: Count | None = None
    seconds: Seconds | None = None
    stopped: str = ""
    parameters: str = ""
    accuracy: Share | None = None


_KINDS: Mapping[str, type[Event]] = {
    "state": StateChanged, "telemetry": Telemetry, "round": RoundCompleted, "evaluation": Evaluated,
    "warning": WarningRaised, "roster": RosterComplete, "failed": ProcessFailed, "finished": ProcessFinished,
}  # fmt: skip


def parse(fields: Mapping[str, Any]) -> Event | None:
    """An event from the JSON object that it was written as; None for a kind or schema that this version does not know.

    Raises ValueError, which says what is wrong, for fields of a wrong type, missing, or out of bounds.
    """
    kind, version = fields.get("event"), fields.get("schema_version", 1)
    if not isinstance(kind, str) or kind not in _KINDS or not isinstance(version, int) or version > SCHEMA_VERSION:
        return None
    try:
        event = msgspec.convert(fields, _KINDS[kind])
    except (RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from None
    if not event.time:
        raise ValueError("it has no time")
    return event


class EventLog:
    """Appends events to one file. A line is one write, so that a reader never sees two events mixed.

    Used by one thread, or by several that each write whole events (O_APPEND keeps lines apart). With no path, events
    are dropped: a process started by hand without a job directory has no log. With `talk`, what has a message is
    printed there too, so that a process's log is not empty when it is killed.

    Training goes on without a log: when the disk is full, that is said once on stderr, and later events are dropped.
    """

    def __init__(
        self, path: Path | None, *, party: str = "", role: str = "", rank: int = -1, talk: TextIO | None = None
    ) -> None:
        self._who = {"party": party, "role": role, "rank": rank}
        self._talk = talk
        self._path = path
        self._file = -1
        self._full = False
        self._numbers = itertools.count(1)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def write(self, event: Event) -> None:
        """Append one event with the time of now."""
        if self._file >= 0 and not self._full:
            line = self._line(event)
            try:
                if os.write(self._file, line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                self._full = True  # and stays open: another thread may be about to write
                _say(sys.stderr, f"no more events are written to {self._path}: {error.strerror}")
        message = getattr(event, "message", "")
        if self._talk is not None and message and not isinstance(event, ProcessFailed):
            _say(self._talk, f"{time.strftime('%H:%M:%S')} {event.__struct_config__.tag}: {message}")

    def close(self) -> None:
        """Close the file; later writes are dropped."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _line(self, event: Event) -> bytes:
        fields = msgspec.to_builtins(event)
        fields |= {"schema_version": SCHEMA_VERSION, "number": next(self._numbers), "time": round(time.time(), 6)}
        return encode({**self._who, **fields})


def _say(stream: TextIO, text: str) -> None:
    """Print a line; the stream may be a file on the same full disk."""
    with contextlib.suppress(OSError):
        print(text, file=stream, flush=True)
