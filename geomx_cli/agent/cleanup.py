"""Cleanup after an agent that was killed or does not respond."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from geomx_cli.agent import processes
from geomx_cli.agent.host_spec import AgentState, HostSpec
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.errors import CheckFailed

__all__ = ["clean_up", "host_spec_of", "main", "remains"]

_LIMIT = 10.0  # seconds; on a loaded machine a killed process may take long to disappear


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Clean up; print the remaining pids and return 1 if there are any."""
    left = clean_up(directory)
    print(" ".join(str(pid) for pid in left))
    return 1 if left else 0


def clean_up(directory: Path, names: Collection[str] | None = None) -> list[int]:
    """Kill the agent of `directory` and all processes it started; remove key files and sockets. Return the remaining
    pids. With `names` kill only these processes and remove nothing.

    No-op if nothing was started.
    """
    left = processes.end(remains(directory, names), _LIMIT)
    host_spec = host_spec_of(directory)
    if names is None and host_spec is not None:
        host_spec.remove_secrets()
    return sorted({who.pid for who in left})


def remains(directory: Path, names: Collection[str] | None = None) -> Callable[[], list[ProcessId]]:
    """Return a function that finds what still runs of this host's part of the job: the agent, its processes (with
    `names` only these, without the agent), and their descendants.

    Processes of other jobs are never matched: the criteria are pid and start time, a session whose leader is still
    alive, or the job's own variables in the environment.
    """
    marks = _marks(directory, host_spec_of(directory), names)
    state = AgentState.read(directory)
    started = {} if state is None else state.processes
    known = [who for name, who in started.items() if names is None or name in names]
    if names is None and state is not None:
        known.append(state.agent)

    def find() -> list[ProcessId]:
        alive = [who for who in known if processes.exists(who)]
        found = {*alive, *processes.session_members(who.pid for who in alive), *processes.marked(*marks)}
        if names is None:  # a new agent may not have written its state yet
            found |= {*processes.with_arguments("-m", "geomx_cli.agent", "run", str(directory))}
        return sorted(found)

    return find


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
