"""An agent that was killed is followed by another, which starts its processes again.

The kernel kills the processes of a killed agent. The next agent is started by the keeper, a process that waits for the
agent, or, if that was killed too, by the next `attach`. Whoever starts an agent holds the lock of its directory, and
the agent inherits the lock. So there is one agent at most, and there is none if nobody holds the lock.
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from geomx_cli.agent import state_folder
from geomx_cli.agent.host_spec import AgentState, HostSpec
from geomx_cli.agent.processes import uptime
from geomx_cli.core.conventions import STATE_ENDED

__all__ = ["WINDOW", "keep", "lock", "successor_of"]

WINDOW = 600.0
"""Seconds within which `--restarts` limits the agents that follow killed ones."""
_POLL = 0.05


def lock(directory: Path, limit: float = 0.0) -> int | None:
    """Take the lock of an agent's directory; return its descriptor, to be closed, or None if an agent, its keeper or
    somebody who starts it holds the lock for `limit` seconds.
    """
    descriptor = os.open(directory / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + limit
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(descriptor)
                return None
            time.sleep(_POLL)
        else:
            return descriptor


def successor_of(directory: Path, host_spec: HostSpec) -> AgentState | None:
    """Return what a new agent goes on from if the last one was killed; None if none is to follow.

    None follows before the processes have started, once their end was asked for, after `--restarts` agents in 10
    minutes, and if a process that has not ended could not go on. Call with the lock.
    """
    state = AgentState.read(directory)
    if state is None or not state.runs or (directory / "agent-end.jsonl").exists():
        return None
    if len(_recent(state)) >= host_spec.restarts:
        return None
    folders = state_folder.found(directory)
    for task in host_spec.tasks:
        if task.name in state.ended:
            continue
        if not task.resumes or not folders or (folders[0] / task.file_name / STATE_ENDED).exists():
            return None
    return state


def successions(before: AgentState) -> tuple[float, ...]:
    """When agents have followed killed ones, with the one that begins now (seconds since boot)."""
    return (*_recent(before), uptime())


def _recent(state: AgentState) -> tuple[float, ...]:
    now = uptime()
    return tuple(when for when in state.successions if now - when < WINDOW)


def keep(
    directory: Path, host_spec: HostSpec, begin: Callable[[int, AgentState | None], None], ready: int,
    before: AgentState | None,
) -> int:  # fmt: skip
    """Start an agent, wait for its end, and start another as often as it was killed. Return its exit status.

    begin: called in a fork of this process with `ready`, -1 from the second agent on, and with what the agent goes on
        from; it does not return.
    ready: a descriptor, which this process closes.
    """
    while True:
        agent = os.fork()
        if agent == 0:
            os.setsid()
            begin(ready, before)
        if ready >= 0:
            os.close(ready)
            ready = -1
        _, status = os.waitpid(agent, 0)
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        before = successor_of(directory, host_spec)
        if before is None:
            return 1
