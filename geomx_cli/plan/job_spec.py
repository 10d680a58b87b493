"""The specification of a job: a script or the bundled training, its options, and paths."""

import os
import re
import secrets
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from geomx_cli.core.conventions import START_FOLDER, file_name
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.core.options import Value
from geomx_cli.inventory import Host

__all__ = ["JobSpec", "complete", "new_job_id"]

_PYTHON = re.compile(r"python[0-9.]*[a-z]?")


@dataclass(frozen=True)
class JobSpec:
    """What to run.

    options: may omit defaults.
    script: the script's command; () for the bundled training.
    job_dir, socket_dir, key_dir: apply to every host, with two exceptions. A host with `state_dir` keeps the job in
        `{state_dir}/jobs/{job}`, with the keys below. A host with `sockets` has its own folder for sockets. Each
        process has its own key file. Without `key_dir` there are no keys, and processes listen on loopback only.
    python: for hosts that name none.
    env: environment of processes on this machine (PYTHONPATH, thread counts). A host's `env` and a process's own
        variables override it.
    carried: words of the script that name files copied to other machines, with the files' paths below `files_dir`.
    script_digest: SHA-256 over the script and the files of --sync, by which reports distinguish versions; "" for none.
    starts: whether workers of the bundled job begin with what a job of other numbers has left, in `start_dir_on`.
    script_warning: why the script may not train by the job's algorithm, for its records; "" if nothing is known to be
        wrong.
    """

    job: str = ""
    options: Mapping[str, Value] = field(default_factory=dict)
    script: tuple[str, ...] = ()
    carried: Mapping[str, str] = field(default_factory=dict)
    script_digest: str = ""
    script_warning: str = ""
    starts: bool = False
    job_dir: str = ""
    socket_dir: str = ""
    key_dir: str = ""
    python: str = "python3"
    env: Mapping[str, str] = field(default_factory=dict)

    def job_dir_on(self, host: Host) -> str:
        """Return the job's directory on `host`."""
        return f"{host.state_dir}/jobs/{self.job}" if host.state_dir else self.job_dir

    def socket_dir_on(self, host: Host) -> str:
        """Return the folder for unix sockets on `host`, specific to the account there."""
        token = PurePosixPath(self.socket_dir).name.rpartition("-")[2]
        return f"{host.sockets}-{token}" if host.sockets else self.socket_dir

    def start_dir_on(self, host: Host) -> str:
        """Return the folder from which the workers on `host` begin; "" if they begin anew."""
        return f"{self.job_dir_on(host)}/{START_FOLDER}" if self.starts else ""

    def key_file_on(self, host: Host, process: str) -> str:
        """Return the path of a process's key file on `host`; "" in a job without keys."""
        if not self.key_dir:
            return ""
        folder = f"{self.job_dir_on(host)}/keys" if host.state_dir else self.key_dir
        return f"{folder}/{file_name(process)}.key"

    def command_on(self, host: Host) -> list[str]:
        """Return the script's command for `host`; on remote hosts with the paths of copied files, and with local
        Python paths replaced by the host's Python.
        """
        if host.shares_files:
            return list(self.script)
        python = host.python or self.python
        files = {word: f"{self.job_dir_on(host)}/files/{place}" for word, place in self.carried.items()}
        own = {
            word: python
            for number, word in enumerate(self.script)
            if (number == 0 or "/" in word) and _PYTHON.fullmatch(PurePosixPath(word).name)
        }
        return [files.get(word) or own.get(word) or word for word in self.script]


# Default ids and paths of jobs.

_TOKEN = 4  # bytes


def new_job_id() -> str:
    """Return a unique job id, sortable by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(_TOKEN)}"


def complete(spec: JobSpec) -> JobSpec:
    """Fill in a missing job id, and defaults for missing paths."""
    job = spec.job or new_job_id()
    directory = spec.job_dir or str(jobs_folder() / job)
    sockets = spec.socket_dir or str(Path(tempfile.gettempdir(), f"gx-{os.getuid()}-{secrets.token_hex(_TOKEN)}"))
    key_dir = spec.key_dir or str(Path(directory, "keys"))
    return replace(spec, job=job, job_dir=directory, socket_dir=sockets, key_dir=key_dir)
