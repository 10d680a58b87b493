"""Ends what an agent has left behind that was killed or does not answer."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from geomx_cli.agent import processes
from geomx_cli.agent.host_spec import AgentState, HostSpec
from geomx_cli.agent.processes import Identity
from geomx_cli.core.errors import CheckFailed

__all__ = ["host_spec_of", "main", "reap", "remains"]

_LIMIT = 10.0  # a killed process of a loaded machine may take seconds to be gone


def main(directory: Path, arguments: Sequence[str]) -> int:
    """Reap; pids that are left go to stdout, and then the exit status is 1."""
    left = reap(directory)
    print(" ".join(str(pid) for pid in left))
    return 1 if left else 0


def reap(directory: Path, names: Collection[str] | None = None) -> list[int]:
    """Kill the agent of `directory` and all that it started; remove key files and sockets. The pids that are
    left. With `names` only these processes are killed and nothing is removed.

    Where nothing was started, nothing is done.
    """
    left = processes.end(remains(directory, names), _LIMIT)
    host_spec = host_spec_of(directory)
    if names is None and host_spec is not None:
        host_spec.remove_secrets()
    return sorted({who.pid for who in left})


def remains(directory: Path, names: Collection[str] | None = None) -> Callable[[], list[Identity]]:
    """A function that finds what still runs of this host's part of the job: the agent, its processes (with
    `names` only these, without the agent), and what they have started.

    Nobody else's process is among them: they are known by pid and start time, by a session that one of them
    still leads, or by the job's own variables in their environment.
    """
    marks = _marks(directory, host_spec_of(directory), names)
    state = AgentState.read(directory)
    started = {} if state is None else state.processes
    known = [who for name, who in started.items() if names is None or name in names]
    if names is None and state is not None:
        known.append(state.agent)

    def find() -> list[Identity]:
        alive = [who for who in known if processes.exists(who)]
        found = {*alive, *processes.session_members(who.pid for who in alive), *processes.marked(*marks)}
        if names is None:  # an agent that has only just begun may have written nothing yet
            found |= {*processes.commanded("-m", "geomx_cli.agent", "run", str(directory))}
        return sorted(found)

    return find


def host_spec_of(directory: Path) -> HostSpec | None:
    """What agent.json says; None where there is none, or one that is damaged."""
    try:
        return HostSpec.read(directory)
    except (OSError, CheckFailed):
        return None


def _marks(
    directory: Path, host_spec: HostSpec | None, names: Collection[str] | None
) -> list[dict[str, str]]:
    """The variables that every process of this part of the job has inherited; one dict for each kind."""
    if host_spec is not None:
        part = {"GEOMX_JOB": host_spec.job, "GEOMX_HOST": host_spec.host}
    else:  # the directory says as much, being DIRECTORY/hosts/HOST
        part = {"GEOMX_JOB_DIR": str(directory.parent.parent), "GEOMX_HOST": directory.name}
    return [part] if names is None else [{**part, "GEOMX_PROCESS": name} for name in names]
