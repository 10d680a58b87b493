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
    "Broken",
    "Done",
    "Ended",
    "Failed",
    "Gone",
    "Hello",
    "Interrupt",
    "Mended",
    "Replaced",
    "Said",
    "Started",
    "Stopping",
    "Suspend",
    "Told",
    "Warned",
    "failure_of",
    "failures_of",
    "said",
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


class Said(msgspec.Struct, frozen=True):
    """A message; `process` is one of the host's own, where there is one."""


class Hello(Said, frozen=True):
    """An agent is connected, perhaps again, or was known `late` seconds ago."""

    status: AgentStatus
    late: float = 0.0


class Started(Said, frozen=True):
    """A process was started."""

    process: str


class Told(Said, frozen=True):
    """A process wrote an event, `age` seconds ago."""

    process: str
    event: dict[str, Any]
    age: float


class Warned(Said, frozen=True):
    """Something is wrong on the host, and the job goes on."""

    message: str


class Ended(Said, frozen=True):
    """A process has ended; `asked`: because somebody asked for it."""

    process: str
    status: int
    asked: bool


class Failed(Said, frozen=True):
    """A process has failed, `age` seconds ago."""

    failure: FailureWords
    age: float


class Stopping(Said, frozen=True):
    """Somebody who is not at this terminal has asked the agent to end the job."""

    who: str
    patience: float


class Done(Said, frozen=True):
    """The agent's part is over."""

    why: str
    asked: str
    left: list[str]


class Gone(Said, frozen=True):
    """There is no agent any more, or none that can be reached."""

    how: str
    reachable: bool = True


class Broken(Said, frozen=True):
    """The connection broke; for `limit` seconds it is tried to mend it, 0: for as long as it takes."""

    why: str
    limit: float = 0.0


class Mended(Said, frozen=True):
    """The connection is there again."""


class Replaced(Said, frozen=True):
    """The agent follows another control machine."""


class Interrupt(Said, frozen=True):
    """The person here wants an end."""


class Suspend(Said, frozen=True):
    """The person here wants to stop this process (Ctrl-Z), not the job."""


_KINDS: Mapping[str, type[Said]] = {
    "hello": Hello, "started": Started, "event": Told, "ended": Ended, "failure": Failed, "stopping": Stopping,
    "warning": Warned,
    "done": Done, "gone": Gone, "broken": Broken, "mended": Mended, "replaced": Replaced, "interrupt": Interrupt,
    "suspend": Suspend,
}  # fmt: skip


def said(message: Mapping[str, Any], host: str, places: Mapping[str, str]) -> Said | None:
    """A message of `host`, its texts plain; None for one that says nothing new. `places`: process -> host.

    Raises ValueError for one that makes no sense, or speaks of a process that is not of that host.
    """
    kind = _KINDS.get(str(message.get("type")))
    if kind is None:
        return None
    found = convert(message, kind)
    match found:
        case Started(process) | Told(process) | Ended(process):
            own = places.get(process) == host
        case Failed(failure):
            own = places.get(failure["process"]) == host
        case Interrupt() | Suspend():
            own = not host
        case _:
            own = True
    if not own or not all(math.isfinite(getattr(found, name, 0.0)) for name in ("age", "late", "limit", "patience")):
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
