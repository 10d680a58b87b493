"""Messages to schedulers for those processes of this host that cannot send any: they have not joined yet, or were
killed.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from geomx_cli.agent import processes
from geomx_cli.agent.child import Child
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.core.conventions import module_command

__all__ = ["NOTICE", "PresenceProcesses"]

NOTICE = 10.0  # seconds for others to be told of a failure
_SOON = 5.0  # seconds in which most processes join
_AGAIN = 10.0  # seconds until one that has ended is replaced


class PresenceProcesses:
    """Runs runtime/presence.py with a process's variables, where no control machine follows the job. Not thread-safe.

    One for each scheduler stays connected while processes have not joined: the scheduler misses a host that is lost,
    and lets a script take any time on one that is not. `tells`: whether one tells of a failure.
    """

    def __init__(self, host_spec: HostSpec) -> None:
        self._host_spec = host_spec
        self._staying: dict[str, tuple[subprocess.Popen[bytes], float]] = {}  # by scheduler; and when it began
        self._telling: list[subprocess.Popen[bytes]] = []

    @property
    def tells(self) -> bool:
        return bool(self._telling)

    def check(self, children: Sequence[Child], now: float) -> None:
        """Begin or end to stand for processes that have not joined."""
        for scheduler in dict.fromkeys(child.task.scheduler for child in children if child.task.scheduler):
            own = [child for child in children if child.task.scheduler == scheduler]
            waiting = [child for child in own if child.life.running and child.life.events.waits]
            awaited = [child.name for child in waiting if now - child.life.began > _SOON]
            staying = self._staying.get(scheduler)
            if not waiting:
                if staying is not None and staying[0].stdin is not None:
                    staying[0].stdin.close()  # and it ends
                    staying[0].poll()
            elif awaited and (
                staying is None or (staying[0].poll() is not None and now - staying[1] > _AGAIN)
            ):
                process = self._run(own[0], subprocess.PIPE, "stay", *awaited)
                self._staying |= {scheduler: (process, now)} if process is not None else {}

    def tell(self, child: Child, cause: str, hint: str, *, verb: str = "fail") -> None:
        """Report a failure to the processes on other hosts, which would wait for this process. verb: "absent" if the
        end of the process is a failure only if it had not joined; its scheduler knows.
        """
        process = self._run(child, subprocess.DEVNULL, verb, cause, hint) if child.task.scheduler else None
        if process is not None:
            self._telling.append(process)

    def close(self) -> None:
        """End; wait until others have been told."""
        end = time.monotonic() + NOTICE
        for process in self._telling:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        for process, _ in self._staying.values():
            process.kill()
            process.wait()

    def _run(self, child: Child, stdin: int, *arguments: str) -> "subprocess.Popen[bytes] | None":
        """Run it in the name of `child`, if possible."""
        with suppress(OSError):
            return subprocess.Popen(
                module_command(sys.executable, "geomx_cli.runtime.presence", *arguments),
                stdin=stdin,
                env={**self._host_spec.inherited(), **child.task.env, "GEOMX_SUPERVISED": "1"},
                preexec_fn=processes.die_with_parent(os.getpid()),  # noqa: PLW1509 - takes no lock that a thread may hold
            )
        return None
