"""Which hosts start the workers of a party's process group again, if the group has workers on several hosts."""

from collections.abc import Iterator

from geomx_cli.jobs.actions.agent_connection import JsonObject
from geomx_cli.plan import Plan

__all__ = ["GroupRestarts"]


class GroupRestarts:
    """Sends messages to the agents when one of the workers has died, and when all have ended (agent/groups.py). Not
    thread-safe.
    """

    def __init__(self, plan: Plan) -> None:
        self._hosts: dict[str, set[str]] = {}  # with workers, by party
        for process in plan.processes:
            if process.role == "worker":
                self._hosts.setdefault(process.party, set()).add(process.host)
        self._halted: dict[str, set[str]] = {}

    def on_halted(self, host: str, party: str, died: str, how: str) -> Iterator[tuple[str, JsonObject]]:
        """All workers of a party on this host have ended. Yield the messages to agents, each with its host.

        An agent may report it twice: after its connection broke, and to a control machine that begins to follow the
        job.
        """
        halted = self._halted.setdefault(party, set())
        halted.add(host)
        missing = self._hosts[party] - halted
        if missing:
            yield from ((each, {"type": "halt", "process": died, "how": how}) for each in sorted(missing))
            return
        halted.clear()
        yield from ((each, {"type": "regroup", "party": party}) for each in sorted(self._hosts[party]))
