"""Slurm's commands, and the connector for a node of an allocation.

All run on a login node, which may be this machine, or on a node of the allocation itself. Each command on a node is a
short job step, which passes its streams on to the long step there (agent/job_step.py). So compute nodes need no sshd,
and on the login node nothing of geomx runs on when this machine disconnects.
"""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from geomx_cli.core.conventions import module_command
from geomx_cli.core.errors import CheckFailed, HostUnreachable, TimedOut
from geomx_cli.core.untrusted import last_line
from geomx_cli.hosts.interface import Channel, Completed, Connector
from geomx_cli.inventory import Slurm

__all__ = [
    "IDLE", "SlurmConnector", "SlurmJob", "addresses", "find_job", "in_step", "long_step", "notify", "slurm",
]  # fmt: skip

IDLE = 300.0  # seconds after which an allocation that nobody uses ends
_LIMIT = 60.0  # seconds for a command of Slurm
_FRESH = 5.0  # seconds for which an allocation that was there is still there
_AT_ONCE = threading.BoundedSemaphore(8)  # a login node's sshd takes 10 new connections at a time (MaxStartups)
_NO_STEP = 125
_NO_FILE = 44
_PUT = 'umask 077 && mkdir -p "${1%/*}" && cat >"$1.$$" && chmod "$2" "$1.$$" && mv -f "$1.$$" "$1"'
_GET = f'[ -e "$1" ] || exit {_NO_FILE}; exec cat "$1"'
_SILENT = ("Unable to contact slurm controller", "timed out", "connection failure")
_HAS_NODES = ("RUNNING", "SUSPENDED")
_WAITS = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")


@dataclass(frozen=True)
class SlurmJob:
    """A job as squeue shows it. start: when Slurm expects it to begin, "" if it does not know."""

    id: int
    state: str
    reason: str = ""
    start: str = ""
    nodes: str = ""
    partition: str = ""

    @property
    def waits(self) -> bool:
        """Whether it has no nodes yet."""
        return self.state in _WAITS

    @property
    def has_nodes(self) -> bool:
        """Whether commands can run on its nodes."""
        return self.state in _HAS_NODES


def slurm(login: Connector, *words: str, data: bytes = b"") -> str:
    """Run a command of Slurm and return its output. Raises CheckFailed with the end of its stderr if it fails, and
    TimedOut if Slurm's controller does not answer, as while it restarts.
    """
    done = login.run(words, data=data, limit=_LIMIT)
    if done.status:
        said = last_line(done.errors.decode(errors="replace"), f"exit status {done.status}")
        name = words[0] if words[0] != "sh" else "sbatch"
        error = TimedOut if any(words in said for words in _SILENT) else CheckFailed
        raise error(f"{name} on {login.name}: {said}", f"see what {name} says there")
    return done.output.decode(errors="replace")


def find_job(login: Connector, *, name: str = "", job: int = 0) -> SlurmJob | None:
    """Return the job of this name or id; None if Slurm knows none any more. Raises CheckFailed."""
    which = f"--name={name}" if name else f"--jobs={job}"
    try:
        listed = slurm(login, "squeue", "--noheader", "--states=all", which, "--format=%A|%T|%r|%S|%P|%N")
    except CheckFailed as error:
        if "Invalid job id" in error.message:
            return None
        raise
    for line in listed.splitlines()[-1:]:
        number, state, reason, start, partition, nodes = line.strip().split("|", 5)
        start = "" if start == "N/A" else start.replace("T", " ")
        return SlurmJob(int(number), state, reason, start, nodes, partition)
    return None


def addresses(login: Connector, nodes: str) -> dict[str, str]:
    """Return the address of each node of a list such as n[1-3], in its order."""
    names = slurm(login, "scontrol", "show", "hostnames", nodes).split()
    shown = slurm(login, "scontrol", "--oneliner", "show", "node", nodes).splitlines()
    fields = [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in shown]
    known = {each["NodeName"]: each.get("NodeAddr", "") for each in fields if "NodeName" in each}
    return {name: known.get(name) or name for name in names}


def long_step(python: str, container: str, job: str, idle: float) -> list[str]:
    """Return the command of an allocation's long step on each node."""
    return _module(python, container, "step", job, f"{idle:g}")


def notify(python: str, container: str, job: str) -> list[str]:
    """Return the command that, on a node of the allocation, asks the agents there to stop their job."""
    return _module(python, container, "in-step", job)


def in_step(python: str, container: str, job: int | str, nodes: Iterable[str], *words: str) -> list[str]:
    """Return the srun that has the long step on each of these nodes run a command."""
    names = [*nodes]
    srun = ["srun", f"--jobid={job}", "--overlap", "--quiet", f"--nodelist={','.join(names)}", f"--nodes={len(names)}"]
    srun += [f"--ntasks={len(names)}", "--ntasks-per-node=1", "--cpu-bind=none"]
    return [*srun, *_module(python, container, "in-step", str(job), *words)]


def _module(python: str, container: str, verb: str, *words: str) -> list[str]:
    """The command that runs a verb of the agent, in a container if there is one. A shell of the node expands ~."""
    program, *rest = module_command(python, "geomx_cli.agent", verb, *words)
    command = [program, *rest]
    if program.startswith("~/"):
        command = ["sh", "-c", 'exec "$HOME/$0" "$@"', program.removeprefix("~/"), *rest]
    return ["apptainer", "exec", container, *command] if container else command


class SlurmConnector:
    """Runs commands on a node of an allocation. After the end of the allocation they run on its login node, which has
    the files of jobs if `state_dir` is on a file system that all share.
    """

    def __init__(self, name: str, access: Slurm, python: str, login: Connector) -> None:
        self.name = name
        self.python = python
        self.address = access.address
        self._access = access
        self._login = login
        self._alive_until = 0.0

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        """See Connector.run."""
        if not self._has_node():
            return self._login.run(argv, data=data, limit=limit)
        done = self._login.run(self._command(argv), data=data, limit=limit)
        if done.status and (done.status == _NO_STEP or b"srun: error:" in done.errors):
            self._alive_until = 0.0
            if not self._has_node():
                return self._login.run(argv, data=data, limit=limit)
            if done.status == _NO_STEP or b"task 0:" not in done.errors:
                said = last_line(done.errors.decode(errors="replace"), "srun failed")
                hint = f"see what srun --jobid={self._access.job} --overlap hostname says on {self._login.name}"
                raise HostUnreachable(f"host {self.name}: {said}", hint)
        return done

    def open(self, argv: Sequence[str]) -> Channel:
        """See Connector.open."""
        self._alive_until = 0.0
        return self._login.open(self._command(argv) if self._has_node() else argv)

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """See Connector.put."""
        done = self.run(["sh", "-c", _PUT, "sh", path, f"{mode:o}"], data=data, limit=_LIMIT + len(data) / (1 << 20))
        if done.status:
            raise OSError(last_line(done.errors.decode(errors="replace"), f"{path} was not written"))

    def get(self, path: str) -> bytes:
        """See Connector.get."""
        done = self.run(["sh", "-c", _GET, "sh", path], limit=_LIMIT)
        if done.status == _NO_FILE:
            raise FileNotFoundError(path)
        if done.status:
            raise OSError(last_line(done.errors.decode(errors="replace"), f"{path} was not read"))
        return done.output

    def check_files(self) -> None:
        """See Connector.check_files: they need no more than commands do."""

    def close(self) -> None:
        """See Connector.close."""
        self._login.close()

    def _command(self, argv: Sequence[str]) -> list[str]:
        access = self._access
        return in_step(self.python, access.container, access.job, [access.node], *argv)

    def _has_node(self) -> bool:
        now = time.monotonic()
        if now < self._alive_until:
            return True
        try:
            with _AT_ONCE:
                job = find_job(self._login, job=self._access.job)
        except CheckFailed as error:
            raise HostUnreachable(f"host {self.name}: {error.message}", error.hint) from None
        if job is None or not job.has_nodes:
            return False
        self._alive_until = now + _FRESH
        return True
