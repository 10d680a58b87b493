"""What one agent is to run (`agent.json`) and what it has started (`agent-state.json`)."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from geomx_cli.agent.processes import Identity, boot_id
from geomx_cli.core.atomic import write_atomic
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.process_name import file_name

__all__ = ["AgentState", "FileDigest", "HostSpec", "Task"]


@dataclass(frozen=True)
class FileDigest:
    """What a file must be like before anything is started: its mode and its content's SHA-256."""

    mode: int
    sha256: str

    def problem(self, path: str) -> str:
        """What is wrong with the file at `path`, in words; "" when it is the one."""
        try:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            with Path(path).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{path} cannot be read: {error.strerror}"
        if mode != self.mode:
            return f"{path} has mode {mode:o}, not {self.mode:o}"
        return "" if digest == self.sha256 else f"{path} differs from what was copied"


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
        return file_name(self.name)


@dataclass(frozen=True)
class HostSpec:
    """One host's part of a job. Holds no keys, only the paths of their files.

    `job_dir` has events/ and logs/; `sockets` is a short folder that the agents of the machine share;
    `socket` is where this agent listens, inside it. `clear` names variables that a task does not inherit.
    `lease`: seconds that the agent goes on without the control machine, 0 for ever; `silence`: that a process may be
    stopped. `files`: what was put on the host for this job, by path.
    """

    job: str
    host: str
    job_dir: str
    sockets: str
    socket: str
    working_dir: str
    clear: tuple[str, ...]
    tasks: tuple[Task, ...]
    lease: float = 300.0
    silence: float = 300.0
    files: Mapping[str, FileDigest] = field(default_factory=dict)

    @property
    def directory(self) -> str:
        """The host's own directory in the job: the agent is started with it."""
        return f"{self.job_dir}/hosts/{self.host}"

    def encode(self) -> bytes:
        """As it lies in agent.json."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def read(cls, directory: Path) -> "HostSpec":
        """Read agent.json. Raises OSError where it cannot be read, CheckFailed for one that no launch has written."""
        path = directory / "agent.json"
        try:
            return cls.decode(path.read_bytes())
        except ValueError:
            raise CheckFailed(f"{path} is damaged", "somebody else writes there, or the disk is full") from None

    @classmethod
    def decode(cls, data: bytes) -> "HostSpec":
        """What `encode` made. Raises ValueError for anything else."""
        try:
            fields = json.loads(data)
            tasks = tuple(Task(task["name"], tuple(task["argv"]), task["env"]) for task in fields.pop("tasks"))
            files = {path: FileDigest(**seal) for path, seal in fields.pop("files").items()}
            return cls(**{**fields, "clear": tuple(fields["clear"]), "tasks": tasks, "files": files})
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no host spec: {error!r}") from None

    def check_files(self) -> None:
        """Raises CheckFailed when a file of the job is missing or not what was put there."""
        problems = [text for path, seal in self.files.items() if (text := seal.problem(path))]
        if problems:
            raise CheckFailed("; ".join(problems), "somebody else writes there, or the disk is full: launch again")

    def inherited(self) -> dict[str, str]:
        """The variables of ours that its processes get: all but a job's own, for what a user's shell has set must
        not reach into this one.
        """
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DMLC_", "GEOMX_")) and name not in self.clear
        }
        return {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **ours}

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
            with suppress(FileNotFoundError):  # another agent of this machine removes the folder just now
                for part in list(path.parent.glob(f"{path.name}.*.part")):  # a launch was killed while it wrote it
                    part.unlink(missing_ok=True)
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
        write_atomic(directory / "agent-state.json", json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, directory: Path) -> "AgentState | None":
        """None where no agent has started anything since the machine was booted."""
        try:
            fields = json.loads((directory / "agent-state.json").read_bytes())
            if fields["boot"] != boot_id():
                return None
            processes = {name: Identity(*who) for name, who in fields["processes"].items()}
            return cls(Identity(*fields["agent"]), processes, fields["boot"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
