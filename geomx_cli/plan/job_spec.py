"""What a job is: a script or the bundled training, its options, and where its files lie."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from geomx_cli.core.options import Value
from geomx_cli.core.process_name import file_name
from geomx_cli.inventory import Host

__all__ = ["JobSpec"]

_PYTHON = re.compile(r"python[0-9.]*[a-z]?")


@dataclass(frozen=True)
class JobSpec:
    """What to run. `options` may leave out those at their default; `script` is () for the bundled job.

    `job_dir`, `socket_dir` and `key_dir` are paths on every host; one with a `state_dir` has the job in
    `{state_dir}/jobs/{job}` and its keys beneath, and one with `sockets` a folder of its own for them. Each process has
    its own file of keys; without `key_dir` there are none, and processes listen on loopback only. `python` is for hosts
    that name none. `env` is what each process of this machine has beneath its own variables (a host's `env` goes before
    it): PYTHONPATH, thread counts. `carried` are words of the script that name files which other machines get, with
    their place below `files_dir`.
    """

    job: str = ""
    options: Mapping[str, Value] = field(default_factory=dict)
    script: tuple[str, ...] = ()
    carried: Mapping[str, str] = field(default_factory=dict)
    job_dir: str = ""
    socket_dir: str = ""
    key_dir: str = ""
    python: str = "python3"
    env: Mapping[str, str] = field(default_factory=dict)

    def job_dir_on(self, host: Host) -> str:
        """The job's directory on `host`."""
        return f"{host.state_dir}/jobs/{self.job}" if host.state_dir else self.job_dir

    def socket_dir_on(self, host: Host) -> str:
        """The folder for unix sockets on `host`: of the account that has the job there."""
        token = PurePosixPath(self.socket_dir).name.rpartition("-")[2]
        return f"{host.sockets}-{token}" if host.sockets else self.socket_dir

    def key_file_on(self, host: Host, process: str) -> str:
        """Where a process on `host` finds its keys; "" in a job without."""
        if not self.key_dir:
            return ""
        folder = f"{self.job_dir_on(host)}/keys" if host.state_dir else self.key_dir
        return f"{folder}/{file_name(process)}.key"

    def command_on(self, host: Host) -> list[str]:
        """The script's command; on another machine with the files that it got where they lie there, and its own Python
        in the place of one that is named by its path here.
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
