"""What an agent records of itself and its processes: `agent-state.json`."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from geomx_cli.agent.processes import ProcessId, boot_id
from geomx_cli.core.files import write_atomic

__all__ = ["AgentState"]


@dataclass(frozen=True)
class AgentState:
    """What is to be known of an agent after it was killed: to terminate its processes, or to start them again.

    agent: itself, or the one before it until it has begun.
    processes: the newest life of each, by name.
    boot: see processes.boot_id.
    life: the number of this agent; it counts those that were killed.
    successions: when agents have followed killed ones in the last 10 minutes, in seconds since boot.
    incarnations: of each process, by name.
    ended: exit statuses of those that have ended.
    asked: names of those whose end was asked for.
    together: how often all processes of the job have begun again.
    """

    agent: ProcessId
    processes: Mapping[str, ProcessId]
    boot: str
    life: int = 0
    successions: tuple[float, ...] = ()
    incarnations: Mapping[str, int] = field(default_factory=dict)
    ended: Mapping[str, int] = field(default_factory=dict)
    asked: tuple[str, ...] = ()
    together: int = 0

    def is_open(self, name: str) -> bool:
        """Whether a process has neither ended nor was asked to."""
        return name not in self.ended and name not in self.asked

    def write(self, directory: Path) -> None:
        """Replace agent-state.json atomically. Raises OSError."""
        write_atomic(directory / "agent-state.json", json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path) -> "AgentState | None":
        """Read agent-state.json; None if it is missing, malformed or from before the last boot."""
        try:
            fields = json.loads((directory / "agent-state.json").read_bytes())
            if fields["boot"] != boot_id():
                return None
            fields["agent"] = ProcessId(*fields["agent"])
            fields["processes"] = {name: ProcessId(*who) for name, who in fields["processes"].items()}
            fields["successions"], fields["asked"] = tuple(fields["successions"]), tuple(fields["asked"])
            return cls(**fields)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
