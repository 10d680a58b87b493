"""An agent's spec (`agent.json`)."""

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from geomx_cli.core.conventions import file_name
from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.stop_files import StopFiles

__all__ = ["FileDigest", "HostSpec", "Task"]


@dataclass(frozen=True)
class FileDigest:
    """Required mode and SHA-256 of a file, verified before any process is started."""

    mode: int
    sha256: str

    def problem(self, path: str) -> str:
        """Return an error message if the file at `path` does not match, else ""."""
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
    """One process: its name in the plan, its command, and its variables in addition to the agent's own."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def role(self) -> str:
        """As in event logs; "" for a program that is none of geomx's."""
        return self.env.get("DMLC_ROLE_GLOBAL") or self.env.get("DMLC_ROLE", "")

    @property
    def scheduler(self) -> str:
        """Address of the first scheduler that it joins; "" for a process that joins none."""
        places = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"), ("DMLC_PS_GLOBAL_ROOT_URI", "DMLC_PS_GLOBAL_ROOT_PORT")
        found = (f"{self.env[uri]}:{self.env.get(port, '')}" for uri, port in places if self.env.get(uri))
        return "" if self.role.endswith("scheduler") else next(found, "")

    @property
    def serves(self) -> bool:
        """Whether workers need this process until they have ended."""
        return self.role.endswith(("server", "scheduler"))

    @property
    def resumes(self) -> bool:
        """Whether a restarted process continues from the state of its earlier life: schedulers, servers and workers do.
        A script that does not save announces this (Child.lacks_state).
        """
        return self.serves or self.role == "worker"

    @property
    def runs_script(self) -> bool:
        """Whether it is a worker that runs a user's script."""
        return self.role == "worker" and self.argv[-1] != "geomx_cli.runtime"

    @property
    def file_name(self) -> str:
        """Base name of its files: "A/worker:1" has "A-worker-1.log"."""
        return file_name(self.name)


@dataclass(frozen=True)
class HostSpec:
    """One host's part of a job. Contains no keys, only the paths of key files.

    job_dir: contains events/ and logs/.
    sockets: a short folder shared by the agents of the machine.
    socket: this agent's listening socket in it.
    clear: variables that tasks do not inherit.
    lease: seconds that the agent keeps running without the control machine, 0 for no limit.
    silence: seconds that a process may be stopped.
    grace: seconds that processes may take to end once the job is stopped or has failed.
    restarts: times that a killed process, if it resumes, may be restarted within 10 minutes.
    resume: the checkpoint (checkpoints.py) from which the processes go on; "" for none.
    checkpoint_to: the option: where checkpoints are uploaded; "" for nowhere.
    timeout: the option: seconds that this place may be silent.
    on_worker_loss: the option.
    clock_ahead: see JobClock.
    files: digests, by path, of the files copied to the host for this job.
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
    grace: float = 30.0
    restarts: int = 0
    resume: str = ""
    checkpoint_to: str = ""
    timeout: float = 60.0
    on_worker_loss: str = "end"
    clock_ahead: float = 0.0
    files: Mapping[str, FileDigest] = field(default_factory=dict)

    @property
    def stop_files(self) -> StopFiles:
        """Beside `socket`."""
        return StopFiles(f"{self.socket}.stop")

    @property
    def directory(self) -> str:
        """The host's directory in the job, passed to the agent on start."""
        return f"{self.job_dir}/hosts/{self.host}"

    def encode(self) -> bytes:
        """Return the content of agent.json."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def read(cls, directory: Path) -> "HostSpec":
        """Read agent.json. Raises OSError if it is unreadable, CheckFailed if it is malformed."""
        path = directory / "agent.json"
        try:
            return cls.decode(path.read_bytes())
        except ValueError:
            raise CheckFailed(f"{path} is damaged", "somebody else writes there, or the disk is full") from None

    @classmethod
    def decode(cls, data: bytes) -> "HostSpec":
        """Inverse of `encode`. Raises ValueError for anything else."""
        try:
            fields = json.loads(data)
            tasks = tuple(Task(task["name"], tuple(task["argv"]), task["env"]) for task in fields.pop("tasks"))
            files = {path: FileDigest(**digest) for path, digest in fields.pop("files").items()}
            return cls(**{**fields, "clear": tuple(fields["clear"]), "tasks": tasks, "files": files})
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"no host spec: {error!r}") from None

    def check_files(self) -> None:
        """Raise CheckFailed if a file of the job is missing or differs from what was copied."""
        problems = [text for path, digest in self.files.items() if (text := digest.problem(path))]
        if problems:
            raise CheckFailed("; ".join(problems), "somebody else writes there, or the disk is full: launch again")

    def inherited(self) -> dict[str, str]:
        """Return the variables that processes inherit from the agent: all except a job's own, so that settings of the
        user's shell do not leak into this job.
        """
        ours = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DMLC_", "GEOMX_")) and name not in self.clear
        }
        return {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", **ours}

    def secrets(self) -> list[Path]:
        """Return the paths of key files, unix sockets and the files beside them, which must be removed with the
        processes.
        """
        paths = [Path(self.socket), *self.stop_files.paths]
        for task in self.tasks:
            if key := task.env.get("GEOMX_KEY_FILE"):
                paths.append(Path(key))
            for endpoint in task.env.get("GEOMX_BIND", "").split():
                if endpoint.startswith("ipc://"):
                    paths.append(Path(endpoint.removeprefix("ipc://")))
        return paths

    def remove_secrets(self) -> None:
        """Remove `secrets()` and the folders that become empty."""
        for path in self.secrets():
            path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):  # another agent on this machine removed the folder concurrently
                for part in list(path.parent.glob(f"{path.name}.*.part")):  # partial writes of a killed launch
                    part.unlink(missing_ok=True)
        for folder in {path.parent for path in self.secrets()}:
            try:
                folder.rmdir()
            except OSError:  # removed or still used by another agent on this machine
                pass
