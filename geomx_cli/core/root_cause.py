"""Descriptions of process failures, and selection of a job's root cause."""

import re
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from geomx_cli.core.agent_status import FailureFields

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_LOST = re.compile(  # message of ps/ for a lost member
    r"(?P<peer>\S+) has been (?P<how>silent|gone) for (?P<time>\d+ s)(?: on link (?P<observer>\S+) - )?"
)

FULL_DISK = "; the disk at "  # in a cause; its mount point and host follow
_PEER_FAILED = " failed, and the job with it; its log says why"

__all__ = ["FULL_DISK", "Failure", "blamed_peer", "describe_status", "exception_line", "first_cause", "peer_failed"]


@dataclass(frozen=True)
class Failure:
    """A failure of one process or, with `process` empty, of a host's agent.

    `cause` is a phrase to follow its name: "exited with status 1: ValueError: ...". `peer` is the process that it
    blames, "" for itself. `when` is in seconds of the reader's clock. `tail` has the last lines of its log. `fault`:
    what failed if not the process itself: its "host" is unreachable, the "link" between its host and another, or its
    "agent" took too long to stop the job, which has another cause.
    `also`: other processes that failed with the same cause.
    """

    process: str
    host: str
    cause: str
    when: float
    hint: str = ""
    peer: str = ""
    tail: Sequence[str] = field(default=())
    fault: Literal["", "agent", "host", "link"] = ""
    also: Sequence[str] = ()

    def to_message(self) -> FailureFields:
        """Return its fields as JSON data."""
        return {
            "process": self.process, "host": self.host, "cause": self.cause, "when": self.when, "hint": self.hint,
            "peer": self.peer, "tail": list(self.tail),
        }  # fmt: skip


def describe_status(status: int, *, memory: bool = False) -> str:
    """Describe an exit status, or a negated signal number. `memory`: the OOM killer has just ended a process."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if memory and -status == signal.SIGKILL:
        return f"was killed by {name}: the machine ran out of memory"
    return f"crashed ({name})" if -status in _CRASHES else f"was killed by {name}"


def exception_line(lines: Sequence[str]) -> str:
    """Return the exception line of the last traceback in a log, or ""."""
    found, inside = "", False
    for line in lines:
        if line.startswith("Traceback (most recent call last):"):
            inside = True
        elif inside and line and not line[0].isspace():
            found, inside = line.strip(), False
    return found


def peer_failed(peer: str) -> str:
    """Return the last words of a process that ends because `peer` failed."""
    return peer + _PEER_FAILED


def blamed_peer(lines: Sequence[str]) -> str:
    """Return the peer of the last line that ends in `peer_failed`, or "": a full disk has no room for the event."""
    found = next((line for line in reversed(lines) if line.endswith(_PEER_FAILED)), "")
    return found.removesuffix(_PEER_FAILED).rpartition(" ")[2]


def first_cause(
    failures: Sequence[Failure], hosts: Mapping[str, str], done: Collection[str] = ()
) -> Failure | None:
    """Return the most likely root cause, or None. `hosts`: process -> host; `done`: processes that exited with status
    0.

    A failure that blames no peer outranks all that do, regardless of time: a process often detects a dead peer before
    that peer's agent does. If all blame peers, the end of the chain of blame is the cause, even if that process
    reported nothing: it hangs or is disconnected. If its host is also unreachable from here, the host is the cause;
    if only other hosts lost it, the link between them.
    """
    own = [failure for failure in failures if not failure.peer and failure.fault not in ("agent", "host")]
    if own:
        found = _as_told(min(own, key=_when), own, [failure for failure in failures if failure.peer], hosts, done)
        same = {failure.process for failure in own if failure.cause == found.cause} - {found.process}
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
    """Of processes that ended while a disk was full, return the one that others blame, with the error that it reported
    to them: its log and its event log may have had no room for that.
    """
    if not blames or FULL_DISK not in found.cause:
        return found
    end = _end_of_blame(blames, hosts, done)
    named = next((one for one in own if one.process == end.process and FULL_DISK in one.cause), found)
    cause, _, disk = named.cause.partition(FULL_DISK)
    if named.process != end.process or ": " in cause or not end.cause.startswith("reported to "):
        return named
    return replace(named, cause=f"{end.cause.partition(FULL_DISK)[0]}{FULL_DISK}{disk}")


def _blamed_hosts(failure: Failure, hosts: Mapping[str, str]) -> list[str]:
    """Return the hosts of the workers of which one has ended, where it blames a party's ("A/worker"): a collective
    operation of theirs does not tell which.
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
    cause, hint = f"was declared lost by {failure.process}, which {failure.cause}", failure.hint
    words = failure.cause.partition(": ")[2]
    if words and failure.peer not in words:  # the peer's own error, which it could not log, e.g. on a full disk
        cause = f"reported to {failure.process}: {words}"
    if failure.peer in done:
        cause = f"ended with status 0 but did not leave the job; {failure.process} missed it"
        if "/worker:" in failure.peer:
            hint = "let Python exit normally: os._exit and exec skip leaving the job"
    return Failure(failure.peer, hosts[failure.peer], cause, failure.when, hint)


def _broken_link(blame: Failure, blames: Sequence[Failure], hosts: Mapping[str, str]) -> Failure | None:
    """Return a link failure if `blame` reports a silent or closed connection and no process on the peer's own host lost
    it; if the peer had ended, its agent would have reported it.
    """
    peer, lost = blame.peer, _LOST.search(blame.cause)
    here, observer = hosts[peer], _observer(blame)
    there = hosts.get(observer, blame.host)
    missed_here = any(other.peer == peer and hosts.get(_observer(other), other.host) == here for other in blames)
    if lost is None or lost["peer"] != peer or missed_here:
        return None
    if lost["how"] == "silent":
        what = f"not heard by {observer} on host {there} for {lost['time']}"
        why = f"the link between hosts {here} and {there} is broken, or the process hangs"
    else:
        what = f"cut off from {observer} on host {there} for {lost['time']}"
        why = f"a firewall or NAT between hosts {here} and {there} rejects the connection, or the process has closed it"
    hint = "run geomx doctor; if the link is healthy, see the log of the process"
    return Failure(peer, here, f"was {what}, though it ran: {why}", blame.when, hint, fault="link")


def _observer(blame: Failure) -> str:
    """Return the process that lost the peer: the others of the job fail with the same message."""
    lost = _LOST.search(blame.cause)
    return lost["observer"] if lost is not None and lost["observer"] else blame.process
