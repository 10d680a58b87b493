"""Descriptions of process failures, and selection of a job's root cause."""

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypedDict, cast

from geomx_cli.core.errors import Missed

__all__ = ["Ending", "Failure", "FailureFields", "describe_status", "ending_of", "exception_line", "first_cause"]

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
Ending = Literal["", "crashed", "exited", "killed", "out of memory", "reported", "unstarted"]


class FailureFields(TypedDict):
    """A Failure as JSON data. when: see JobClock."""

    process: str
    host: str
    how: str
    when: float
    hint: str
    peer: str
    tail: list[str]
    message: str
    disk: str
    ending: Ending
    observer: str
    missed: Missed
    seconds: float


@dataclass(frozen=True)
class Failure:
    """A failure of one process. If `process` is empty, a failure of a host's agent.

    how: what happened, a phrase that follows the process's name: "exited with status 1".
    when: seconds of the reader's clock.
    peer: the process that it blames; "" if it blames itself.
    tail: the last lines of its log.
    fault: what failed, if not the process itself. "host": its host is unreachable. "link": the link between its host
        and another host failed. "agent": its agent took too long to stop the job, and the stop has another cause.
    also: other processes that failed with the same cause.
    message: its own error, as "ValueError: there is no data"; "" if it reported none.
    disk: the mount point and device of a full disk of its host, on which its last output may be missing; or "".
    ending: how the process ended. "reported": by a signal, after it had reported its failure.
    observer, missed, seconds: see PeerLost.
    """

    process: str
    host: str
    how: str
    when: float
    hint: str = ""
    peer: str = ""
    tail: Sequence[str] = field(default=())
    fault: Literal["", "agent", "host", "link"] = ""
    also: Sequence[str] = ()
    message: str = ""
    disk: str = ""
    ending: Ending = ""
    observer: str = ""
    missed: Missed = ""
    seconds: float = 0.0

    @property
    def cause(self) -> str:
        """A phrase that follows the process's name, for users: "exited with status 1: ValueError: there is no data"."""
        full = f"; the disk at {self.disk} of host {self.host} is full" if self.disk else ""
        return f"{self.how}{': ' if self.message else ''}{self.message}{full}"

    def to_message(self) -> FailureFields:
        """Return the fields that an agent knows as JSON data."""
        fields = {name: getattr(self, name) for name in FailureFields.__annotations__}
        return cast(FailureFields, {**fields, "tail": list(self.tail)})


def ending_of(status: int, *, memory: bool = False) -> Ending:
    """Classify an exit status, or a negated signal number. memory: whether the OOM killer has just ended a process."""
    if status >= 0:
        return "exited"
    if memory and -status == signal.SIGKILL:
        return "out of memory"
    return "crashed" if -status in _CRASHES else "killed"


def describe_status(status: int, *, memory: bool = False) -> str:
    """Describe what `ending_of` classifies."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    match ending_of(status, memory=memory):
        case "out of memory":
            return f"was killed by {name}: the machine ran out of memory"
        case "crashed":
            return f"crashed ({name})"
    return f"was killed by {name}"


def exception_line(lines: Sequence[str]) -> str:
    """Return the exception line of the last traceback in a log, or ""."""
    found, inside = "", False
    for line in lines:
        if line.startswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line and not line[0].isspace():
            found, inside = line.strip(), False
    return found


def first_cause(
    failures: Sequence[Failure], hosts: Mapping[str, str], done: Collection[str] = ()
) -> Failure | None:
    """Return the most likely root cause, or None.

    hosts: process -> host.
    done: processes that exited with status 0.

    A failure that blames no peer outranks all failures that blame one, regardless of time. The reason: a process often
    detects a dead peer before the peer's agent detects the death. If all failures blame peers, the end of the chain of
    blame is the cause. That process may have reported nothing because it hangs or is disconnected. If that process's
    host is also unreachable from here, the host is the cause. If only other hosts lost it, the link between them is the
    cause.
    """
    own = [failure for failure in failures if not failure.peer and failure.fault not in ("agent", "host")]
    if own:
        found = _as_told(min(own, key=_when), own, [failure for failure in failures if failure.peer], hosts, done)
        same = {one.process for one in own if (one.how, one.message) == (found.how, found.message)} - {found.process}
        return replace(found, also=sorted(same))
    cut = {failure.host: failure for failure in failures if failure.fault in ("agent", "host")}
    blames = [failure for failure in failures if failure.peer]
    if not blames:
        return min(cut.values(), key=_when, default=None)
    found = _end_of_blame(blames, hosts, done)
    return next((cut[place] for place in (found.host, *_blamed_hosts(found, hosts)) if place in cut), found)


def _as_told(
    found: Failure, own: Sequence[Failure], blames: Sequence[Failure], hosts: Mapping[str, str], done: Collection[str]
) -> Failure:
    """If processes ended while a disk was full, return the process that the others blame, with the error that it
    reported to them. Its own logs may have had no room for the error.
    """
    if not (blames and found.disk):
        return found
    end = _end_of_blame(blames, hosts, done)
    named = next((one for one in own if one.process == end.process and one.disk), None)
    if named is None or named.message or not end.message:
        return named or found
    return replace(named, how=end.how, message=end.message)


def _blamed_hosts(failure: Failure, hosts: Mapping[str, str]) -> list[str]:
    """The hosts of the party's workers that a failure blames together ("A/worker"), if one of these workers has ended.
    Their collective operation does not tell which worker is at fault.
    """
    group = f"{failure.peer}:"
    return [host for name, host in hosts.items() if name.startswith(group) and name != failure.process]


def _when(failure: Failure) -> float:
    return failure.when


def _end_of_blame(blames: Sequence[Failure], hosts: Mapping[str, str], done: Collection[str]) -> Failure:
    blamers = {failure.process: failure for failure in reversed(blames)}
    failure, seen = min(blames, key=_when), set[str]()
    while failure.peer in blamers and failure.process not in seen:
        seen.add(failure.process)
        failure = blamers[failure.peer]
    if failure.peer not in hosts:
        return failure
    if failure.peer not in done and (link := _broken_link(failure, blames, hosts)) is not None:
        return link
    if failure.peer in seen:
        return failure
    how, message, hint = f"was declared lost by {failure.process}, which {failure.cause}", "", failure.hint
    if failure.peer in done:
        how = f"ended with status 0 but did not leave the job; {failure.process} missed it"
        if "/worker:" in failure.peer:
            hint = "let Python exit normally: os._exit and exec skip leaving the job"
    elif failure.observer == failure.peer:  # the peer's own error, which it could not log, e.g. on a full disk
        how, message = f"reported to {failure.process}", failure.message
    return Failure(failure.peer, hosts[failure.peer], how, failure.when, hint, message=message)


def _broken_link(blame: Failure, blames: Sequence[Failure], hosts: Mapping[str, str]) -> Failure | None:
    """Return a link failure if `blame` reports a silent or closed connection and no process on the peer's own host lost
    the peer. If the peer had ended, its agent would have reported that.
    """
    peer, here, observer = blame.peer, hosts[blame.peer], _observer(blame)
    there, time = hosts.get(observer, blame.host), f"{blame.seconds:.0f} s"
    missed_here = any(other.peer == peer and hosts.get(_observer(other), other.host) == here for other in blames)
    if not blame.missed or missed_here:
        return None
    if blame.missed == "silent":
        what = f"not heard by {observer} on host {there} for {time}"
        why = f"the link between hosts {here} and {there} is broken, or the process hangs"
    else:
        what = f"cut off from {observer} on host {there} for {time}"
        why = f"a firewall or NAT between hosts {here} and {there} rejects the connection, or the process has closed it"
    hint = "run geomx doctor; if the link is healthy, see the log of the process"
    return Failure(peer, here, f"was {what}, though it ran: {why}", blame.when, hint, fault="link")


def _observer(blame: Failure) -> str:
    """Return the process that lost the peer. The other processes of the job fail with the same message."""
    return (blame.missed and blame.observer) or blame.process
