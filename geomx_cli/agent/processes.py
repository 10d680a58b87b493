"""Process inspection and termination on Linux, through /proc.

Pids are reused; a pid together with its start time is unique until the next boot.
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
    "ProcessId",
    "adopt_orphans",
    "boot_id",
    "with_arguments",
    "descendants",
    "die_with_parent",
    "exists",
    "identify",
    "kill_all",
    "marked",
    "run_time",
    "send_signal",
    "session_members",
    "state",
    "uptime",
]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)
_READ = 1 << 17  # bytes at once


class ProcessId(NamedTuple):
    """A process: its pid and its start time in clock ticks since boot."""

    pid: int
    started: int


class _Status(NamedTuple):
    state: str
    parent: int
    session: int
    started: int


def _read(pid: int | str) -> _Status | None:
    content = _content(pid, "stat")
    if not content:
        return None
    fields = content[content.rindex(b")") + 2 :].split()  # the process name may contain blanks and parentheses
    return _Status(fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def _content(pid: int | str, name: str) -> bytes:
    """Return a file of /proc/PID; b"" if it cannot be read. A machine may have thousands of processes, all of which are
    read: this takes a third of pathlib's time.
    """
    try:
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        found = b""
        while part := os.read(descriptor, _READ):
            found += part
        return found
    except OSError:  # it has just ended
        return b""
    finally:
        os.close(descriptor)


def _all() -> Iterator[tuple[int, _Status]]:
    for name in (entry.name for entry in os.scandir("/proc")):
        if name.isdigit() and (status := _read(name)) is not None:
            yield int(name), status


def identify(pid: int) -> ProcessId | None:
    """Return the identity of the process with this pid, or None."""
    status = _read(pid)
    return ProcessId(pid, status.started) if status else None


def state(who: ProcessId) -> str:
    """Return the proc(5) state: R, S, D, T (stopped), t (traced), Z (zombie), or "" if the process is gone."""
    status = _read(who.pid)
    return status.state if status and status.started == who.started else ""


def is_stopped(who: ProcessId) -> bool:
    """Whether all threads of a process are stopped, or it has ended. A thread in a system call stops at its end."""
    for thread in Path(f"/proc/{who.pid}/task").glob("*"):
        with suppress(OSError, IndexError):
            if (thread / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX":
                return False
    return True


def run_time(who: ProcessId) -> float:
    """Return the seconds of processor time of its threads, without those of libzmq, which only answer."""
    used = 0
    for thread in Path(f"/proc/{who.pid}/task").glob("*"):
        with suppress(OSError, ValueError, IndexError):  # it has just ended, or the kernel does not tell
            if not (thread / "comm").read_text().startswith("ZMQbg"):
                used += int((thread / "schedstat").read_text().split()[0])
    return used * 1e-9


def exists(who: ProcessId) -> bool:
    """Whether it still runs; a zombie does not."""
    return state(who) not in ("", "Z", "X")


def boot_id() -> str:
    """Return an identifier that changes with each boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def uptime() -> float:
    """Return seconds since boot, from /proc/uptime."""
    return float(Path("/proc/uptime").read_text().split()[0])


def session_members(sessions: Iterable[int]) -> list[ProcessId]:
    """Return the running processes of these sessions (session ids)."""
    wanted = set(sessions)
    return [
        ProcessId(pid, status.started)
        for pid, status in _all()
        if status.session in wanted and status.state not in "ZX"
    ]


def descendants(ancestor: int) -> list[ProcessId]:
    """Return the running descendants of a process, in whatever session."""
    children: dict[int, list[tuple[int, _Status]]] = {}
    for pid, status in _all():
        children.setdefault(status.parent, []).append((pid, status))
    found, open_ = [], [ancestor]
    while open_:
        for pid, status in children.get(open_.pop(), ()):
            open_.append(pid)
            if status.state not in "ZX":
                found.append(ProcessId(pid, status.started))
    return found


def marked(*kinds: Mapping[str, str]) -> list[ProcessId]:
    """Return the running processes whose initial environment has all variables of one of `kinds`. Skips processes
    with an unreadable environment.
    """
    wanted = [[f"\0{name}={value}\0".encode() for name, value in variables.items()] for variables in kinds]
    found = []
    for pid, status in _all():
        environment = b"\0" + _content(pid, "environ") + b"\0"
        if any(all(entry in environment for entry in entries) for entries in wanted):
            found.append(ProcessId(pid, status.started))
    return found


def with_arguments(*arguments: str) -> list[ProcessId]:
    """Return the running processes whose command line ends with these arguments."""
    wanted = [argument.encode() for argument in arguments]
    found = []
    for pid, status in _all():
        command = _content(pid, "cmdline").split(b"\0")[:-1]
        if command[-len(wanted) :] == wanted:
            found.append(ProcessId(pid, status.started))
    return found


def kill_all(find: Callable[[], list[ProcessId]], limit: float) -> list[ProcessId]:
    """Kill what `find` returns until it returns nothing; return what is left after `limit` seconds."""
    deadline = time.monotonic() + limit
    while (left := find()) and time.monotonic() < deadline:
        send_signal(left, signal.SIGKILL)
        time.sleep(0.02)
    return left


def send_signal(whom: Iterable[ProcessId], number: signal.Signals) -> None:
    """Send a signal to those that still exist."""
    for who in whom:
        if exists(who):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(who.pid, number)


def adopt_orphans() -> None:
    """Make this process the subreaper of its descendants, so that orphans are reparented to it."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> Callable[[], None]:
    """Return a preexec function for a child of process `parent`: the kernel kills the child when the parent ends."""

    def prepare() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(128 + signal.SIGKILL)

    return prepare
