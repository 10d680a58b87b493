"""Why a process failed, and which failure of a job came first."""

import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

__all__ = ["Failure", "describe_status", "exception_line", "first_cause"]


@dataclass(frozen=True)
class Failure:
    """One process that failed, or, with `process` empty, the agent of a host.

    `cause` is a phrase that follows its name: "exited with status 1: ValueError: ...". `peer` is the process
    that it blames, "" for itself. `when` is in seconds of the reader's clock. `tail` has the last lines of
    its log.
    """

    process: str
    host: str
    cause: str
    when: float
    hint: str = ""
    peer: str = ""
    tail: Sequence[str] = field(default=())

    def to_message(self) -> dict[str, Any]:
        """Its fields, as JSON can carry them."""
        return {**asdict(self), "tail": list(self.tail)}


def describe_status(status: int, *, memory: bool = False) -> str:
    """A phrase for an exit status, or minus a signal's number. `memory`: the kernel has just ended something.
    """
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
    """The line of the last traceback in a log that says what was raised; "" when there is none."""
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
    """The failure that all others follow from, as far as they tell. `hosts`: process -> host; `done`:
    processes that have ended with status 0.

    One that failed by itself outranks those that blame another process, whatever came first: a process often
    sees a dead peer before that peer's agent sees it. Where all blame others, it is the process at the end of
    the chain of blame, even if that one has said nothing at all: then it fell silent, or is stuck.
    """
    own = [failure for failure in failures if not failure.peer]
    if own:
        return min(own, key=lambda failure: failure.when)
    if not failures:
        return None
    blamers = {failure.process: failure for failure in reversed(failures)}
    failure, seen = min(failures, key=lambda failure: failure.when), set[str]()
    while failure.peer in blamers and failure.process not in seen:
        seen.add(failure.process)
        failure = blamers[failure.peer]
    if failure.peer in seen or failure.peer not in hosts:
        return failure
    cause, hint = f"was given up by {failure.process}, which {failure.cause}", failure.hint
    if failure.peer in done:
        cause = f"ended with status 0 but did not leave the job; {failure.process} missed it"
        if "/worker:" in failure.peer:
            hint = "let Python run to its end: os._exit and exec skip what leaves the job"
    return Failure(failure.peer, hosts[failure.peer], cause, failure.when, hint)
