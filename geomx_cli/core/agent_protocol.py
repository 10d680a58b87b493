"""Validated types of the messages that an agent sends (agent/supervisor.py)."""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from geomx_cli.core.agent_status import AgentStatus
from geomx_cli.core.events import Count, Seconds, Share
from geomx_cli.core.root_cause import Failure, FailureFields
from geomx_cli.core.untrusted import convert

__all__ = [
    "Done",
    "Emptied",
    "Ended",
    "Failed",
    "Frozen",
    "Halted",
    "Hello",
    "Kept",
    "HostUsage",
    "Message",
    "Logged",
    "Published",
    "Replaced",
    "Restarted",
    "Started",
    "Stopping",
    "Uploaded",
    "Warned",
    "failure_of",
    "failures_of",
    "parse",
]


# CPU, memory and GPU use of a host, as its agent measures it (agent/status.py).

_Name = Annotated[str, Meta(max_length=80)]


class _Gpu(msgspec.Struct):
    """memory: bytes used and installed."""

    name: _Name = ""
    busy: Share | None = None
    memory: tuple[Count, Count] = (0, 0)


class HostUsage(msgspec.Struct):
    """The use of a host.

    time: when it was measured, see JobClock.
    cpu: busy fraction of all `cores`.
    memory: bytes in use, and installed.
    peak: the most bytes in use since the agent began.
    machine: its boot id, by which geomx recognises hosts on one machine.
    """

    time: Seconds
    cpu: Share
    cores: Count
    memory: tuple[Count, Count]
    peak: Count = 0
    machine: _Name = ""
    gpus: Annotated[list[_Gpu], Meta(max_length=16)] = []

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON data."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


# Messages.

class Message(msgspec.Struct, tag_field="type", frozen=True):
    """Base class of messages. `process`, if present, is a process of the sending host."""


class Hello(Message, tag="hello", frozen=True):
    """The agent is connected or reconnected. Or its status is known, and `late` seconds old."""

    status: AgentStatus
    late: float = 0.0


class Started(Message, tag="started", frozen=True):
    """A process was started."""

    process: str


class Restarted(Message, tag="restarted", frozen=True):
    """A process that died was started again.

    incarnation: its number of restarts.
    how: how it died.
    count: its restarts within 10 minutes.
    limit: the most restarts within 10 minutes.
    """

    process: str
    incarnation: Count
    how: str
    count: Count
    limit: Count


class Logged(Message, tag="event", frozen=True):
    """A process wrote an event `age` seconds ago."""

    process: str
    event: dict[str, Any]
    age: float


class Warned(Message, tag="warning", frozen=True):
    """A problem on the host that does not end the job."""

    message: str


class Ended(Message, tag="ended", frozen=True):
    """A process has ended. `asked`: whether it was requested to end."""

    process: str
    status: int
    asked: bool


class Failed(Message, tag="failure", frozen=True):
    """A process failed `age` seconds ago."""

    failure: FailureFields
    age: float


class Stopping(Message, tag="stopping", frozen=True):
    """A requester other than this control machine asked the agent to end the job."""

    who: str
    grace: float


class Frozen(Message, tag="frozen", frozen=True):
    """The host's processes are suspended for the checkpoint of this number.

    problem: why they are not suspended; "" if they are.
    newest: the highest number of the host's checkpoints, whichever command has taken them; 0 for none.
    """

    number: Count
    problem: str
    newest: Count = 0


class Kept(Message, tag="kept", frozen=True):
    """The host has finished its part of the checkpoint of this number, and its processes continue. problem: why the
    part is not complete; "" if it is.
    """

    number: Count
    problem: str


class Uploaded(Message, tag="uploaded", frozen=True):
    """done: the host's part of a checkpoint is in the store.

    problem: why it is not in the store; "" if it is.
    """

    number: Count
    done: bool
    problem: str


class Published(Message, tag="published", frozen=True):
    """done: a whole checkpoint is in the store, and may be resumed.

    problem: why it is not, or why older checkpoints are still in the store; "" for none.
    """

    number: Count
    done: bool
    problem: str


class Emptied(Message, tag="emptied", frozen=True):
    """All processes of the host have ended. The agent waits for the decision whether they begin again."""


class Halted(Message, tag="halted", frozen=True):
    """All workers of a process group on this host have ended. They wait to begin again together with the group's
    workers on other hosts.

    process: one of the workers.
    died, how: the worker that died first, and how it died.
    """

    process: str
    died: str
    how: str


class Done(Message, tag="done", frozen=True):
    """The agent has ended its part of the job."""

    why: str
    asked: str
    left: list[str]


class Replaced(Message, tag="replaced", frozen=True):
    """Another control machine took over the agent."""


_KINDS: Mapping[str, type[Message]] = {str(kind.__struct_config__.tag): kind for kind in Message.__subclasses__()}


def parse(message: Mapping[str, Any], host: str, places: Mapping[str, str]) -> Message | None:
    """Parse a message of `host`, and strip control characters from its strings. None for a type without content.

    places: process -> host.
    Raises ValueError for a malformed message, or for a message about a process of another host.
    """
    kind = _KINDS.get(str(message.get("type")))
    if kind is None:
        return None
    found = convert(message, kind)
    match found:
        case Started(process) | Restarted(process) | Logged(process) | Ended(process) | Halted(process):
            own = places.get(process) == host
        case Failed(failure):
            own = places.get(failure["process"]) == host
        case _:
            own = True
    if not own or not all(math.isfinite(getattr(found, name, 0.0)) for name in ("age", "late", "grace")):
        raise ValueError(f"a message {message['type']!r} that cannot be its own")
    return found


def failures_of(status: AgentStatus, late: float, host: str, places: Mapping[str, str]) -> Iterator[Failure]:
    """Yield the failures of the host's own processes in a status that is `late` seconds old, with times of this
    machine's monotonic clock.
    """
    now = time.monotonic() - late
    for fields in status["failures"]:
        if places.get(fields["process"]) == host:
            yield failure_of(fields, host, now - (status["time"] - fields["when"]))


def failure_of(fields: FailureFields, host: str, when: float) -> Failure:
    """Build the Failure reported by `host` for one of its processes."""
    return replace(Failure(**fields), host=host, when=when)
