"""`state.json`: the job's state as known to the control machine."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.errors import CheckFailed, GeomxError, Interrupted
from geomx_cli.core.files import write_atomic
from geomx_cli.core.untrusted import decode

__all__ = [
    "DASHBOARD", "FILE_NAME", "JobState", "OWN", "REDIRECT_PAGE", "STATE_VERSION", "UNDECIDED", "detach", "fail",
    "finish", "follow",
]  # fmt: skip

STATE_VERSION = 1
FILE_NAME = "state.json"
UNDECIDED = ("running", "detached", "orphaned")
"""Values of JobState.shown of a job whose end is not known."""


@dataclass(frozen=True)
class JobState:
    """`state` is "running" while a geomx follows the job, "detached" while it runs without one, else how it ended.

    `pid`, `pid_started`, `boot` and `machine`, its host's name, identify the process that follows or followed it; times
    are Unix seconds. `result`: the output of launch --json, or None.
    """

    state: str
    pid: int
    pid_started: int
    boot: str
    machine: str
    started: float
    ended: float | None = None
    result: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, directory: Path) -> "JobState | None":
        """Read state.json; None if it is missing or damaged."""
        try:
            return decode((directory / FILE_NAME).read_bytes(), cls)
        except (OSError, ValueError):
            return None

    @property
    def followed(self) -> bool:
        """Whether the process that follows the job still runs."""
        alive = processes.exists(ProcessId(self.pid, self.pid_started))
        return self.state == "running" and self.boot == processes.boot_id() and alive

    @property
    def elsewhere(self) -> bool:
        """Whether the process that follows the job, if it still runs, does so on a machine that shares this folder."""
        here = self.boot == processes.boot_id() or self.machine == os.uname().nodename
        return self.state == "running" and not here

    @property
    def shown(self) -> str:
        """`state`, or "orphaned" if the process that followed the job is gone and has not recorded its end."""
        return "orphaned" if self.state == "running" and not self.followed else self.state

    @property
    def over(self) -> bool:
        """Whether the job is known to have ended."""
        return self.state not in ("running", "detached")

    @property
    def error(self) -> tuple[str, str] | None:
        """Message and hint of the error with which a job has ended, None of other jobs."""
        words = self.result.get("error") if self.over and self.result else None
        return None if words is None else (words["message"], words["hint"])

    @property
    def failure(self) -> Mapping[str, Any] | None:
        """The failure that has ended the job, as in the result."""
        return self.result.get("failure") if self.over and self.result else None

    @property
    def clean(self) -> bool:
        """Whether nothing of the job can still run: it has ended, all its hosts have confirmed that, and all machines
        were released.
        """
        return self.over and self.result is not None and self.result.get("problems") == []

    def write(self, directory: Path) -> None:
        """Replace state.json atomically. Raises OSError on failure."""
        write_atomic(directory / FILE_NAME, json.dumps({"schema_version": STATE_VERSION, **asdict(self)}).encode())


def follow(directory: Path) -> None:
    """Record this process as the job's follower; a job that was followed before keeps its start time.

    Raises CheckFailed if the state of a new job cannot be written; a job that runs already is not ended for that.
    """
    me, before = processes.identify(os.getpid()), JobState.read(directory)
    assert me is not None
    started = before.started if before else time.time()
    state = JobState("running", me.pid, me.started, processes.boot_id(), os.uname().nodename, started)
    if before is not None:
        _keep(state, directory)
        return
    try:
        state.write(directory)
    except OSError as error:
        hint = "choose another --job-dir, or make room there"
        raise CheckFailed(f"cannot write to {directory}: {error.strerror}", hint) from None


def detach(directory: Path) -> None:
    """Record the job as detached, unless another process has begun to follow it."""
    state = JobState.read(directory)
    if state is not None and state.followed and state.pid == os.getpid():
        _keep(replace(state, state="detached"), directory)


def finish(directory: Path, result: Mapping[str, Any]) -> None:
    """Record the job's end with `result`; a detached job may have ended long before."""
    state = JobState.read(directory)
    if state is not None:
        ended = min(time.time(), state.started + float(result.get("total_s", math.inf)))
        _keep(replace(state, state=str(result["status"]), ended=ended, result=result), directory)


def fail(directory: Path, error: GeomxError) -> None:
    """Record that the job followed by this process failed before it had a result."""
    state = JobState.read(directory)
    if state is not None and state.followed and state.pid == os.getpid():
        words = {"message": error.message, "hint": error.hint}
        status = "interrupted" if isinstance(error, Interrupted) else "failed"
        finish(directory, {"status": status, "exit_code": error.exit_code, "error": words})


def _keep(state: JobState, directory: Path) -> None:
    """Write the state; a failure (disk full) is only reported on stderr, to preserve the job's result."""
    try:
        state.write(directory)
    except OSError as error:
        what = f"{directory / FILE_NAME} cannot be written ({error.strerror}): it does not say that the job is"
        print(f"warning: {what} {state.state}", file=sys.stderr)


# The files in a job's directory that only the control machine has.

DASHBOARD = "dashboard.json"
"""Port and token of the job's last dashboard."""
REDIRECT_PAGE = "dashboard.html"
"""Leads a browser to it."""
OWN = (DASHBOARD, REDIRECT_PAGE, "inventory.json", FILE_NAME, "plan.json")
"""All, in the order in which they are removed: without the last, the job is no longer known here."""
