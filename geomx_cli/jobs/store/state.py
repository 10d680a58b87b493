"""What the control machine knows of a job's life: `state.json` in its directory there."""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from geomx_cli.agent import processes
from geomx_cli.agent.processes import Identity
from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.errors import CheckFailed, GeomxError, Interrupted
from geomx_cli.core.untrusted import decode

__all__ = ["FILE_NAME", "STATE_VERSION", "JobState", "begin", "detach", "fail", "finish"]

STATE_VERSION = 1
FILE_NAME = "state.json"


@dataclass(frozen=True)
class JobState:
    """`state` is "running" while a geomx follows the job, "detached" when it goes on alone, else how it ended.

    `pid`, `pid_started` and `boot` say which process follows or followed it; times are Unix seconds. `result`:
    what launch prints with --json, or None.
    """

    state: str
    pid: int
    pid_started: int
    boot: str
    started: float
    ended: float | None = None
    result: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, directory: Path) -> "JobState | None":
        """None where there is none, or one that is damaged."""
        try:
            return decode((directory / FILE_NAME).read_bytes(), cls)
        except (OSError, ValueError):
            return None

    @property
    def followed(self) -> bool:
        """Whether the process that follows the job still runs."""
        alive = processes.exists(Identity(self.pid, self.pid_started))
        return self.state == "running" and self.boot == processes.boot_id() and alive

    @property
    def shown(self) -> str:
        """`state`, or "lost control" when the process that followed the job is gone and has not said how it
        ended.
        """
        return "lost control" if self.state == "running" and not self.followed else self.state

    @property
    def over(self) -> bool:
        """Whether it is known to have ended."""
        return self.state not in ("running", "detached")

    def write(self, directory: Path) -> None:
        """Replace state.json at once. Raises OSError where that fails."""
        write_atomic(directory / FILE_NAME, json.dumps({"schema_version": STATE_VERSION, **asdict(self)}).encode())


def begin(directory: Path) -> None:
    """This process follows the job from now on; a job that was followed before keeps its start.

    Raises CheckFailed where the state of a new job cannot be written; that of one which runs is no reason to end it.
    """
    me, before = processes.identify(os.getpid()), JobState.read(directory)
    assert me is not None
    started = before.started if before else time.time()
    state = JobState("running", me.pid, me.started, processes.boot_id(), started)
    if before is not None:
        _keep(state, directory)
        return
    try:
        state.write(directory)
    except OSError as error:
        hint = "choose another --job-dir, or make room there"
        raise CheckFailed(f"cannot write to {directory}: {error.strerror}", hint) from None


def detach(directory: Path) -> None:
    """The job goes on alone, unless another process than this one has begun to follow it."""
    state = JobState.read(directory)
    if state is not None and state.followed and state.pid == os.getpid():
        _keep(replace(state, state="detached"), directory)


def finish(directory: Path, result: Mapping[str, Any]) -> None:
    """The job has ended, as `result` says."""
    state = JobState.read(directory)
    if state is not None:
        _keep(replace(state, state=str(result["status"]), ended=time.time(), result=result), directory)


def fail(directory: Path, error: GeomxError) -> None:
    """The job that this process follows did not get as far as to have a result."""
    state = JobState.read(directory)
    if state is not None and state.followed and state.pid == os.getpid():
        words = {"message": error.message, "hint": error.hint}
        status = "interrupted" if isinstance(error, Interrupted) else "failed"
        finish(directory, {"status": status, "exit_code": error.exit_code, "error": words})


def _keep(state: JobState, directory: Path) -> None:
    """Write it; where that fails (a full disk) the job's result is worth more: say so on stderr, and go on."""
    try:
        state.write(directory)
    except OSError as error:
        what = f"{directory / FILE_NAME} cannot be written ({error.strerror}): it does not say that the job is"
        print(f"warning: {what} {state.state}", file=sys.stderr)
