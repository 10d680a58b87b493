"""Starts agents: the first of a job on this host, and those that follow when one was killed.

The kernel kills the processes of a killed agent. The next agent starts them again from their state files. It is started
by the keeper, a process that waits for the agent, or, if that was killed too, by the next `agent attach`.

Who starts an agent holds the lock (agent_lock.py), and writes agent-state.json before: so numbers of lives are never
used again, and agents follow within the limit.
"""

import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from geomx_cli.agent import agent_lock, processes, state_folder
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.next_life import ASKED, WINDOW, next_life
from geomx_cli.core.errors import CheckFailed

__all__ = ["ensure", "start"]

_PAUSE = 0.2  # seconds; the last agent's processes end meanwhile
_LIMIT = 5.0  # seconds for others to let go of the lock


def start(directory: Path, host_spec: HostSpec) -> int:
    """Start the first agent of a job. When it listens, return its pid, or its keeper's; return 0 if it has ended
    before.

    Raises CheckFailed if an agent runs there already. On a file system without locks no agent will follow a killed one.
    """
    try:
        lock = agent_lock.lock(directory, _LIMIT)
    except OSError:
        return _start(directory, replace(host_spec, restarts=0), None, None)
    if lock is None:
        raise CheckFailed(f"an agent runs already for {directory}", "geomx stop ends it")
    return _start(directory, host_spec, lock, None)


def ensure(directory: Path) -> bool:
    """Return whether there is an agent, or a keeper or another who starts one. If there is none, since both were
    killed, start one if the processes can go on.
    """
    try:
        lock = agent_lock.lock(directory)
    except OSError:
        state = AgentState.read(directory)
        return state is not None and processes.exists(state.agent)
    if lock is None:
        return True
    host_spec = HostSpec.read(directory)
    following = _following(directory, host_spec)
    if following is None:
        os.close(lock)
        return False
    return _start(directory, host_spec, lock, following) > 0


def _following(directory: Path, host_spec: HostSpec) -> AgentState | None:
    """Write and return the state with which an agent follows the last one; None if none is to follow.

    No agent follows in these cases: the processes have not started yet; somebody has asked them to end; `--restarts`
    agents were killed in 10 minutes; a process that has not ended could not continue. Call with the lock.
    """
    state, folder = AgentState.read(directory), state_folder.continues(directory)
    if state is None or folder is None or (directory / "agent-end.jsonl").exists():
        return None
    now = processes.uptime()
    recent = tuple(when for when in state.successions if now - when < WINDOW)
    lives = dict(state.incarnations)
    if len(recent) >= host_spec.restarts:
        return None
    for task in host_spec.tasks:
        if state.is_open(task.name):
            lives[task.name] = lives.get(task.name, 0) + 1
            own = folder / task.file_name
            if not any(next_life(task, own, lives[task.name], host_spec.on_worker_loss)):
                return None
    following = replace(state, life=state.life + 1, successions=(*recent, now), incarnations=lives)
    try:
        following.write(directory)
    except OSError:
        return None
    return following


def _start(directory: Path, host_spec: HostSpec, lock: int | None, following: AgentState | None) -> int:
    """Start an agent, with a keeper if others may follow; this process lets go of the lock."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _detach(directory, host_spec, lock, writing, following)
    os.close(writing)
    if lock is not None:
        os.close(lock)
    listens = os.read(reading, 1)
    os.close(reading)
    return pid if listens else 0


def _detach(
    directory: Path, host_spec: HostSpec, lock: int | None, ready: int, following: AgentState | None
) -> NoReturn:
    """Become the agent, or its keeper. ready: gets a byte once an agent listens."""
    status = 1
    try:
        os.setsid()
        _redirect(directory / "agent.log")
        if lock is not None and host_spec.restarts:
            status = _keep(directory, host_spec, lock, ready, following)
        else:
            if lock is not None:
                agent_lock.name_holders(lock, [processes.identify(os.getpid())])
            status = _run(directory, host_spec, ready, following)
    except BaseException as error:
        print(f"error: {error}", file=sys.stderr)
    finally:
        with suppress(OSError):  # a full disk
            sys.stderr.flush()
        os._exit(status)


def _keep(directory: Path, host_spec: HostSpec, lock: int, ready: int, following: AgentState | None) -> int:
    """Start an agent, wait for its end, and start another as often as it was killed. Return its exit status."""
    me = processes.identify(os.getpid())
    while True:
        agent = os.fork()
        if agent == 0:
            os.setsid()
            os._exit(_run(directory, host_spec, ready, following))
        agent_lock.name_holders(lock, [me, processes.identify(agent)])
        _, status = os.waitpid(agent, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) in ASKED:
            return abs(os.waitstatus_to_exitcode(status))
        time.sleep(_PAUSE)
        following = _following(directory, host_spec)
        if following is None:
            if (directory / "agent-end.jsonl").exists():  # it was killed at its very end
                state_folder.remove(directory)
            return 1


def _run(directory: Path, host_spec: HostSpec, ready: int, following: AgentState | None) -> int:
    """Be the agent, and return its exit status; errors are in its log."""
    try:
        from geomx_cli.agent.supervisor import Supervisor

        supervisor = Supervisor(directory, host_spec, following)
        with suppress(OSError):  # who has started the first agent does not wait for later ones
            os.write(ready, b"1")
        os.close(ready)
        return supervisor.run()
    except BaseException as error:
        from geomx_cli.core.errors import GeomxError

        if not isinstance(error, OSError | GeomxError):
            sys.excepthook(type(error), error, error.__traceback__)
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        with suppress(OSError):  # a full disk
            sys.stderr.flush()


def _redirect(log: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, target)
    os.close(nothing)
    os.close(output)
