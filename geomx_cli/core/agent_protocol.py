"""What an agent may say: its status (agent/status.py writes it) and its messages (agent/supervisor.py), checked."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, NotRequired, TypedDict

import msgspec

from geomx_cli.core.root_cause import Failure
from geomx_cli.core.untrusted import convert

__all__ = [
    "AgentStatus",
    "Done",
    "Ended",
    "Failed",
    "Hello",
    "Message",
    "ProcessEvent",
    "Replaced",
    "Started",
    "Stopping",
    "Warned",
    "failure_of",
    "failures_of",
    "parse",
]


class FailureWords(TypedDict):
    """See Failure; `when` by the host's clock."""

    process: str
    host: str
    cause: str
    when: float
    hint: str
    peer: str
    tail: list[str]


class ProcessStatus(TypedDict):
    """One process; `newest`: its newest events by kind, as the process chose to write them."""

    pid: int
    state: str
    status: int | None
    ended: float | None
    asked: bool
    newest: dict[str, dict[str, Any]]


class AgentStatus(TypedDict):
    """All that an agent knows. Times are Unix seconds of its host; `uptime` counts since that was booted; `agent` is
    its pid and when it started, in the kernel's ticks.
    """

    time: float
    uptime: float
    boot: str
    agent: NotRequired[tuple[int, int]]
    stage: str
    why: str
    asked: str
    ordered: bool
    left: list[str]
    processes: dict[str, ProcessStatus]
    failures: list[FailureWords]


class Message(msgspec.Struct, frozen=True):
    """A message; `process` is one of the host's own, where there is one."""


class Hello(Message, frozen=True):
    """An agent is connected, perhaps again, or was known `late` seconds ago."""

    status: AgentStatus
    late: float = 0.0


class Started(Message, frozen=True):
    """A process was started."""

    process: str


class ProcessEvent(Message, frozen=True):
    """A process wrote an event, `age` seconds ago."""

    process: str
    event: dict[str, Any]
    age: float


class Warned(Message, frozen=True):
    """Something is wrong on the host, and the job goes on."""

    message: str


class Ended(Message, frozen=True):
    """A process has ended; `asked`: because somebody asked for it."""

    process: str
    status: int
    asked: bool


class Failed(Message, frozen=True):
    """A process has failed, `age` seconds ago."""

    failure: FailureWords
    age: float


class Stopping(Message, frozen=True):
    """Somebody who is not at this terminal has asked the agent to end the job."""

    who: str
    patience: float


class Done(Message, frozen=True):
    """The agent's part is over."""

    why: str
    asked: str
    left: list[str]


class Replaced(Message, frozen=True):
    """The agent follows another control machine."""


_KINDS: Mapping[str, type[Message]] = {
    "hello": Hello, "started": Started, "event": ProcessEvent, "ended": Ended, "failure": Failed, "stopping": Stopping,
    "warning": Warned,
    "done": Done, "replaced": Replaced,
}  # fmt: skip


def parse(message: Mapping[str, Any], host: str, places: Mapping[str, str]) -> Message | None:
    """A message of `host`, its texts plain; None for one that says nothing new. `places`: process -> host.

    Raises ValueError for one that makes no sense, or speaks of a process that is not of that host.
    """
    kind = _KINDS.get(str(message.get("type")))
    if kind is None:
        return None
    found = convert(message, kind)
    match found:
        case Started(process) | ProcessEvent(process) | Ended(process):
            own = places.get(process) == host
        case Failed(failure):
            own = places.get(failure["process"]) == host
        case _:
            own = True
    if not own or not all(math.isfinite(getattr(found, name, 0.0)) for name in ("age", "late", "patience")):
        raise ValueError(f"a message {message['type']!r} that cannot be its own")
    return found


def failures_of(status: AgentStatus, late: float, host: str, places: Mapping[str, str]) -> Iterator[Failure]:
    """The failures in what `host` knew `late` seconds ago, of its own processes; times are monotonic and of here."""
    now = time.monotonic() - late
    for fields in status["failures"]:
        if places.get(fields["process"]) == host:
            yield failure_of(fields, host, now - (status["time"] - fields["when"]))


def failure_of(fields: FailureWords, host: str, when: float) -> Failure:
    """What a host says of a process of its own that failed."""
    process, cause, hint, peer = fields["process"], fields["cause"], fields["hint"], fields["peer"]
    return Failure(process, host, cause, when, hint, peer, fields["tail"])
