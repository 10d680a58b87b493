"""What one agent is to run (`agent.json`) and what it has started (`agent-state.json`)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from geomx_cli.agent.processes import Identity, boot_id

__all__ = ["Assignment", "AgentState", "Task"]


@dataclass(frozen=True)
class Task:
    """One process: its name in the plan, its command, and the variables that it gets on top of the agent's
    own.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def file_name(self) -> str:
        """What its files are called: "A/worker:1" has "A-worker-1.log"."""
        return self.name.replace("/", "-").replace(":", "-")


@dataclass(frozen=True)
class Assignment:
    """One host's part of a job. Holds no secrets, only the paths of the key files.

    `job_dir` has events/ and logs/; `sockets` is a short folder that the agents of the machine share;
    `socket` is where this agent listens, inside it. `clear` names variables that a task does not inherit.
    """

    job: str
    host: str
    job_dir: str
    sockets: str
    socket: str
    working_dir: str
    clear: tuple[str, ...]
    tasks: tuple[Task, ...]

    def encode(self) -> bytes:
        """As it lies in agent.json."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def read(cls, directory: Path) -> "Assignment":
        """Read agent.json. Raises OSError, ValueError, KeyError or TypeError for one that no launch has
        written.
        """
        fields = json.loads((directory / "agent.json").read_bytes())
        tasks = tuple(Task(task["name"], tuple(task["argv"]), task["env"]) for task in fields.pop("tasks"))
        return cls(**{**fields, "clear": tuple(fields["clear"]), "tasks": tasks})

    def secrets(self) -> list[Path]:
        """Key files of its processes, and their unix sockets: what must not outlive them."""
        paths = [Path(self.socket)]
        for task in self.tasks:
            if key := task.env.get("GEOMX_KEY_FILE"):
                paths.append(Path(key))
            for endpoint in task.env.get("GEOMX_BIND", "").split():
                if endpoint.startswith("ipc://"):
                    paths.append(Path(endpoint.removeprefix("ipc://")))
        return paths

    def remove_secrets(self) -> None:
        """Remove them, and the folders that are empty then."""
        for path in self.secrets():
            path.unlink(missing_ok=True)
        for folder in {path.parent for path in self.secrets()}:
            try:
                folder.rmdir()
            except OSError:  # another agent of this machine still uses it, or has removed it
                pass


@dataclass(frozen=True)
class AgentState:
    """Which processes an agent has started: enough for another program to end them after the agent was
    killed.
    """

    agent: Identity
    processes: Mapping[str, Identity]
    boot: str

    def write(self, directory: Path) -> None:
        """Replace agent-state.json at once."""
        part = directory / "agent-state.json.part"
        part.write_text(json.dumps(asdict(self)))
        part.replace(directory / "agent-state.json")

    @classmethod
    def read(cls, directory: Path) -> "AgentState | None":
        """None where no agent has started anything since the machine was booted."""
        try:
            fields = json.loads((directory / "agent-state.json").read_bytes())
        except (OSError, ValueError):
            return None
        if fields["boot"] != boot_id():
            return None
        processes = {name: Identity(*who) for name, who in fields["processes"].items()}
        return cls(Identity(*fields["agent"]), processes, fields["boot"])
