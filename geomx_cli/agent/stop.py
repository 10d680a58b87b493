"""Terminates this host's part of a job, or one party's processes of it, whether or not its agent still runs."""

import argparse
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from geomx_cli.agent import agent_lock, processes, state_folder
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.agent.host_spec import HostSpec
from geomx_cli.agent.processes import ProcessId
from geomx_cli.agent.status import FILE_NAME
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.jsonlines import encode

__all__ = ["clean_up", "clean_up_main", "main", "remains", "stop"]

DISAPPEAR = 10.0  # seconds; on a loaded machine a killed process may take long to disappear
_WHO = "geomx stop"
_MARGIN = 4.0  # in addition to the patience, for the agent to kill, clean up and exit
_ENDING = 1.0  # for processes connected to the agent to exit after it
_POLL = 0.03
_CONNECT = 2.0


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Stop and print one JSON object; return 1 if processes are left."""
    parser = argparse.ArgumentParser(prog="python -m geomx_cli.agent stop DIRECTORY")
    parser.add_argument("--party", default="", help="end only this party's processes")
    parser.add_argument("--grace", type=float, default=30.0, help="seconds until SIGKILL")
    parser.add_argument("--workers-first", action="store_true", help="return once this host's workers have ended")
    given = parser.parse_args(arguments)
    report = stop(directory, party=given.party, grace=given.grace, workers_first=given.workers_first)
    print(json.dumps(report))
    return 1 if report["left"] else 0


def stop(directory: Path, *, party: str = "", grace: float = 30.0, workers_first: bool = False) -> dict[str, Any]:
    """Ask the agent to terminate its processes, which get SIGKILL after `grace` seconds; then kill what is left.

    With `workers_first` return when this host's workers have ended. Its schedulers and servers go on ("goes on"), until
    the next call or the end of the grace: other hosts' workers may need them to end.

    Returns "agent", "processes" (name -> outcome), "others" (number of further processes killed), "left" (pids that
    could not be terminated) and "note". Idempotent. Tolerates a killed agent, a damaged or missing directory, and a
    reboot. Never touches processes of another job.
    """
    host_spec, state = host_spec_of(directory), AgentState.read(directory)
    started = dict(state.processes) if state else {}
    tasks = [task.name for task in host_spec.tasks] if host_spec else list(started)
    names = [name for name in tasks if not party or name.split("/")[0] == party]
    serving = {task.name for task in host_spec.tasks if task.serves} if host_spec and workers_first else set()
    first = [name for name in names if name not in serving]
    before = {name for name, who in started.items() if processes.exists(who)}
    guards = _guards(directory)
    agent = state.agent if state is not None and processes.exists(state.agent) else next(reversed(guards), None)
    only = first if party or workers_first else None
    if agent is not None and processes.state(agent) != "T":
        asked = _ask(host_spec.socket if host_spec else "", agent, only if party else None, grace, hold=workers_first)
        goes_on = workers_first or (party and before - set(names))
        waited_for = [started[name] for name in first if name in started] + ([] if goes_on else [agent])
        ended = asked and _wait(lambda: any(map(processes.exists, waited_for)), grace + _MARGIN)
        if ended and goes_on:  # its record may come a moment after they have ended
            recorded = [name for name in first if name in before]
            _wait(lambda: any(_statuses(directory).get(name) is None for name in recorded), _ENDING)
        if ended and not workers_first:
            _wait(lambda: bool(remains(directory, only)()), _ENDING)
    rest = set(remains(directory, only)())
    left = clean_up(directory, only)
    statuses = _statuses(directory)
    fates = {
        name: "goes on" if name in serving & before and processes.exists(started[name])
        else _fate(started.get(name), name in before, rest, left, statuses.get(name))
        for name in names
    }  # fmt: skip
    return {
        "agent": _agent_fate(state, agent, rest, left),
        "processes": fates,
        "others": len(rest - set(started.values()) - set(guards)),
        "left": left,
        "note": _note(directory, host_spec is None, state is None),
    }


def _ask(path: str, agent: ProcessId, names: Collection[str] | None, grace: float, *, hold: bool) -> bool:
    """Send the request to the agent's socket; if that fails and everything is to end, send SIGTERM instead."""
    message: dict[str, Any] = {"type": "stop", "who": _WHO, "grace": grace, "hold": hold}
    if names is not None:
        message["processes"] = list(names)
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(_CONNECT)
        try:
            stream.connect(path)
            stream.sendall(encode(message))
            return True
        except OSError:
            if names is None:
                processes.send_signal([agent], signal.SIGTERM)
            return names is None


def _wait(lasts: Callable[[], bool], limit: float) -> bool:
    """Poll until `lasts` is false; return whether that happened within `limit` seconds."""
    deadline = time.monotonic() + limit
    while lasts():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _statuses(directory: Path) -> Mapping[str, int | None]:
    """Return the exit statuses recorded by the agent."""
    try:
        found = json.loads((directory / FILE_NAME).read_bytes())["processes"]
        return {name: fields["status"] for name, fields in found.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _fate(
    who: ProcessId | None, ran: bool, rest: Collection[ProcessId], left: Collection[int], status: int | None
) -> str:
    if who is None:
        return "was not running"
    if who in rest and who.pid in left:
        return f"is left: pid {who.pid}"
    if who in rest:
        return "killed"
    if not ran:
        return "had ended"
    return "killed" if status == -signal.SIGKILL else "stopped"


def _agent_fate(
    state: AgentState | None, agent: ProcessId | None, rest: Collection[ProcessId], left: Collection[int]
) -> str:
    if state is not None and agent is not None and agent not in rest and processes.exists(agent):
        return "goes on"
    return _fate(state.agent if state else None, agent is not None, rest, left, None)


def _note(directory: Path, no_host_spec: bool, no_state: bool) -> str:
    """Return why there was less to do than usual, or ""."""
    if not directory.is_dir():
        return f"{directory} is not there: nothing to do"
    if no_host_spec:
        return "agent.json is missing or damaged: its key files and sockets are not known"
    return "nothing was started since the machine was booted" if no_state else ""


# Cleanup after an agent that was killed or does not respond.

def clean_up_main(directory: Path, arguments: Sequence[str]) -> int:
    """Clean up; print the remaining pids and return 1 if there are any."""
    left = clean_up(directory)
    print(" ".join(str(pid) for pid in left))
    return 1 if left else 0


def clean_up(directory: Path, names: Collection[str] | None = None) -> list[int]:
    """Kill the agent of `directory` and all processes it started; remove key files, sockets and state. Return the
    remaining pids. With `names` kill only these processes and remove nothing.

    No-op if nothing was started.
    """
    if names is not None:
        return _pids(processes.kill_all(remains(directory, names), DISAPPEAR))
    state_folder.forbid(directory)
    deadline, lock = time.monotonic() + DISAPPEAR, None
    while True:  # whoever starts an agent at this moment holds the lock
        left = processes.kill_all(remains(directory), max(0.0, deadline - time.monotonic()))
        with suppress(OSError):  # the directory is gone, or has no locks
            lock = agent_lock.lock(directory)
        if lock is not None or not _guards(directory) or time.monotonic() >= deadline:
            break
    state_folder.remove(directory)
    if (host_spec := host_spec_of(directory)) is not None:
        host_spec.remove_secrets()
    if lock is not None:
        os.close(lock)
    return _pids(left)


def _pids(whom: Collection[ProcessId]) -> list[int]:
    return sorted({who.pid for who in whom})


def remains(directory: Path, names: Collection[str] | None = None) -> Callable[[], list[ProcessId]]:
    """Return a function that finds what still runs of this host's part of the job: the agent, its processes (with
    `names` only these, without the agent), and their descendants.

    Processes of other jobs are never matched: the criteria are pid and start time, a session whose leader is still
    alive, or the job's own variables in the environment.
    """
    marks = _marks(directory, host_spec_of(directory), names)

    def find() -> list[ProcessId]:
        state = AgentState.read(directory)  # each time: an agent that was killed may have been followed by another
        started = {} if state is None else state.processes
        known = [who for name, who in started.items() if names is None or name in names]
        alive = [who for who in known if processes.exists(who)]
        found = {*alive, *processes.session_members(who.pid for who in alive), *processes.marked(*marks)}
        if names is None:
            found |= {*_guards(directory)}
        return sorted(found)

    return find


def _guards(directory: Path) -> list[ProcessId]:
    """Return the relay that has started the agent, its keeper and itself, if they run; the agent last."""
    state = AgentState.read(directory)
    known = [state.agent] if state is not None and processes.exists(state.agent) else []
    by_command = processes.with_arguments("-m", "geomx_cli.agent", "run", str(directory))
    return list(dict.fromkeys([*by_command, *agent_lock.holders(directory), *known]))


def host_spec_of(directory: Path) -> HostSpec | None:
    """Return the content of agent.json; None if it is missing or malformed."""
    try:
        return HostSpec.read(directory)
    except (OSError, CheckFailed):
        return None


def _marks(
    directory: Path, host_spec: HostSpec | None, names: Collection[str] | None
) -> list[dict[str, str]]:
    """Return the variables inherited by every process of this part of the job, one dict per alternative."""
    if host_spec is not None:
        part = {"GEOMX_JOB": host_spec.job, "GEOMX_HOST": host_spec.host}
    else:  # the directory is JOB_DIR/hosts/HOST
        part = {"GEOMX_JOB_DIR": str(directory.parent.parent), "GEOMX_HOST": directory.name}
    return [part] if names is None else [{**part, "GEOMX_PROCESS": name} for name in names]
