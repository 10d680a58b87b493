"""Ends what an agent has left behind that was killed or does not answer."""

from pathlib import Path

from geomx_cli.agent import processes
from geomx_cli.agent.assignment import AgentState, Assignment
from geomx_cli.agent.processes import Identity

__all__ = ["reap"]

_LIMIT = 3.0


def reap(directory: Path) -> list[int]:
    """Kill the agent of `directory` and all that it started; remove key files and sockets. The pids that are
    left.

    Nobody else's process is touched: those to kill are known by pid and start time, by a session that one of
    them still leads, or by the job's own variables in their environment. Where nothing was started, nothing
    is done.
    """
    assignment = Assignment.read(directory)
    state = AgentState.read(directory)
    known = [] if state is None else [state.agent, *state.processes.values()]

    def find() -> list[Identity]:
        alive = [who for who in known if processes.exists(who)]
        marked = processes.marked({"GEOMX_JOB": assignment.job, "GEOMX_HOST": assignment.host})
        # An agent that has only just begun may have written nothing yet.
        agents = processes.commanded("-m", "geomx_cli.agent", str(directory))
        return [*alive, *processes.session_members(who.pid for who in alive), *marked, *agents]

    left = processes.end(find, _LIMIT)
    assignment.remove_secrets()
    return sorted({who.pid for who in left})
