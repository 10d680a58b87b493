"""What the kernel says about processes: who they are, how they are, whose they are. Linux, through /proc.

A pid alone names nobody for long; a pid with its start time does until the machine is booted again.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Identity",
    "adopt_orphans",
    "boot_id",
    "commanded",
    "descendants",
    "die_with_parent",
    "end",
    "exists",
    "identify",
    "marked",
    "session_members",
    "state",
    "tell",
    "uptime",
]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


class Identity(NamedTuple):
    """A process: its pid and when it started, in clock ticks since the machine was booted."""

    pid: int
    started: int


class _Status(NamedTuple):
    state: str
    parent: int
    session: int
    started: int


def _read(pid: int | str) -> _Status | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before it may hold blanks and brackets
    return _Status(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def _all() -> Iterator[tuple[int, _Status]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := _read(entry.name)) is not None:
            yield int(entry.name), status


def identify(pid: int) -> Identity | None:
    """Who has this pid now; None when nobody has."""
    status = _read(pid)
    return Identity(pid, status.started) if status else None


def state(who: Identity) -> str:
    """The letter of proc(5): R, S, D, T (stopped), t (traced), Z (ended, not reaped); "" when it is gone."""
    status = _read(who.pid)
    return status.state if status and status.started == who.started else ""


def exists(who: Identity) -> bool:
    """Whether it still runs; a zombie does not."""
    return state(who) not in ("", "Z", "X")


def boot_id() -> str:
    """Differs after each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Seconds since the machine was booted, as anybody reads them in /proc/uptime."""
    return float(Path("/proc/uptime").read_text().split()[0])


def session_members(sessions: Iterable[int]) -> list[Identity]:
    """The running processes of these sessions (each named by the pid that it began with)."""
    wanted = set(sessions)
    return [
        Identity(pid, status.started)
        for pid, status in _all()
        if status.session in wanted and status.state not in "ZX"
    ]


def descendants(ancestor: int) -> list[Identity]:
    """The running children of a process, their children, and so on; whatever session they moved to."""
    children: dict[int, list[tuple[int, _Status]]] = {}
    for pid, status in _all():
        children.setdefault(status.parent, []).append((pid, status))
    found, open_ = [], [ancestor]
    while open_:
        for pid, status in children.get(open_.pop(), ()):
            open_.append(pid)
            if status.state not in "ZX":
                found.append(Identity(pid, status.started))
    return found


def marked(*kinds: Mapping[str, str]) -> list[Identity]:
    """The running processes that were started with all the environment variables of one of `kinds`, as far as
    we may look.
    """
    wanted = [[f"{name}={value}".encode() for name, value in variables.items()] for variables in kinds]
    found = []
    for pid, status in _all():
        try:
            environment = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if any(environment.issuperset(entries) for entries in wanted):
            found.append(Identity(pid, status.started))
    return found


def commanded(*arguments: str) -> list[Identity]:
    """The running processes whose command line ends with these arguments."""
    wanted = [argument.encode() for argument in arguments]
    found = []
    for pid, status in _all():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if command[-len(wanted) :] == wanted:
            found.append(Identity(pid, status.started))
    return found


def end(find: Callable[[], list[Identity]], limit: float) -> list[Identity]:
    """Kill what `find` returns, again until it returns nothing; what is left after `limit` seconds."""
    deadline = time.monotonic() + limit
    while (left := find()) and time.monotonic() < deadline:
        tell(left, signal.SIGKILL)
        time.sleep(0.02)
    return left


def tell(whom: Iterable[Identity], number: signal.Signals) -> None:
    """Send a signal to those that still exist."""
    for who in whom:
        if exists(who):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(who.pid, number)


def adopt_orphans() -> None:
    """Make this process the parent of its descendants that lose theirs, so that none escapes."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> Callable[[], None]:
    """What a child of the process `parent` calls before it becomes another program: it is killed when that
    one ends.
    """

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it ended before the line above
            os._exit(128 + signal.SIGKILL)

    return prepare
