"""Network namespaces owned by one run: named after their owner, and removed with all processes in them.

A name is `geomx-wan-PID-START-N-PLACE`: process id and start time (in clock ticks since boot) of the owner, a serial
number, and the place that the namespace represents. So two runs never collide, and `sweep` can tell a dead run's
leftovers from those of a live one even if the process id was reused. Everything here needs root.
"""

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from geomx_cli.core.errors import CheckFailed

__all__ = ["Namespaces", "call", "sweep"]

PREFIX = "geomx-wan"
NAMED = Path("/run/netns")
KILL_LIMIT = 5.0
_numbers = itertools.count(1)


def call(argv: Sequence[str], *, lines: Iterable[str] = ()) -> str:
    """The standard output of `argv`, with `lines` as its input. Raises CheckFailed with its error output if it fails.
    """
    if shutil.which(argv[0]) is None:
        raise CheckFailed(f"the program {argv[0]!r} is missing", "install iproute2 and procps")
    done = subprocess.run(argv, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise CheckFailed(f"{' '.join(argv)}: {done.stderr.strip()}", "network namespaces need root")
    return done.stdout


def _owner(pid: int) -> str:
    """PID-START of a live process, PID-gone of another."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"{pid}-gone"
    fields = stat.rpartition(")")[2].split()
    return f"{pid}-gone" if fields[0] in "ZX" else f"{pid}-{fields[19]}"


def _kill_all_in(name: str) -> None:
    """Kill the processes of a namespace, repeatedly: one may fork while it is being killed."""
    limit = time.monotonic() + KILL_LIMIT
    while pids := call(["ip", "netns", "pids", name]).split():
        if time.monotonic() > limit:
            raise CheckFailed(f"processes {', '.join(pids)} in the namespace {name} do not die")
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def _remove(name: str) -> None:
    _kill_all_in(name)
    call(["ip", "netns", "delete", name])


def sweep() -> list[str]:
    """Remove the namespaces of dead runs and the processes in them; returns their names."""
    names = sorted(path.name for path in NAMED.glob(f"{PREFIX}-*-*-*-*"))
    dead = [name for name in names if not name.startswith(f"{PREFIX}-{_owner(int(name.split('-')[2]))}-")]
    for name in dead:
        _remove(name)
    return dead


class Namespaces:
    """The namespaces of one run. `close` may be called at any time, also after a failed `add`, and repeatedly."""

    def __init__(self) -> None:
        self._prefix = f"{PREFIX}-{_owner(os.getpid())}-{next(_numbers)}"
        self._places: list[str] = []

    def add(self, place: str) -> None:
        self._places.append(place)
        call(["ip", "netns", "add", self.name(place)])
        call(["ip", "-n", self.name(place), "link", "set", "lo", "up"])

    def name(self, place: str) -> str:
        return f"{self._prefix}-{place}"

    def command(self, place: str, argv: Sequence[str]) -> list[str]:
        """`argv` with a prefix that runs it inside the namespace, as the same process."""
        return ["ip", "netns", "exec", self.name(place), *argv]

    def configure(self, place: str, lines: Iterable[str]) -> None:
        """Execute ip(8) commands, one per line, inside the namespace."""
        call(["ip", "-n", self.name(place), "-batch", "-"], lines=[*lines, ""])

    def sysctl(self, place: str, values: dict[str, str]) -> None:
        """Set kernel parameters of this namespace only."""
        call(
            self.command(place, ["sysctl", "-q", "-w", *(f"{key}={value}" for key, value in values.items())])
        )

    def close(self) -> None:
        """Kill the processes in the namespaces and remove these, with their devices, shapers and counters."""
        while self._places:
            if (NAMED / self.name(self._places[-1])).exists():
                _remove(self.name(self._places[-1]))
            self._places.pop()
