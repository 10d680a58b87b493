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
    "IDLE", "PLAIN", "WITHOUT_OUTER_JOB", "SlurmConnector", "SlurmJob", "addresses", "find_job", "in_step", "long_step",
    "notify", "own_errors", "slurm",
]  # fmt: skip

PLAIN = ("--cpu-bind=none", "--mpi=none", "--export=ALL")
WITHOUT_OUTER_JOB = (
    "for name in $(env | sed -n -e 's/^\\(SLURM_[A-Za-z0-9_]*\\)=.*/\\1/p' -e 's/^\\(SRUN_[A-Za-z0-9_]*\\)=.*/\\1/p');"
    ' do case $name in SLURM_CONF*|SLURM_CLUSTERS|SLURM_JWT) ;; *) unset "$name" ;; esac; done'
)
"""Shell commands that remove variables which Slurm's commands take for options, as in the allocation of a launch."""
IDLE = 300.0  # seconds after which an allocation that nobody uses ends
_CLEAN = ("sh", "-c", f'{WITHOUT_OUTER_JOB}; exec "$0" "$@"')
_LIMIT = 60.0  # seconds for a command of Slurm
_SLOWEST = 1 << 16  # bytes/s, as over SSH
_FRESH = 5.0  # seconds for which an allocation that was there is still there
_AT_ONCE = threading.BoundedSemaphore(8)  # a login node's sshd takes 10 new connections at a time (MaxStartups)
_NO_STEP = 125
_NO_FILE = 44
# A lost connection ends the stdin like the end of the file does, hence the size.
_PUT = (
    """umask 077 && trap 'rm -f "$1.$$"' EXIT && mkdir -p "${1%/*}" && cat >"$1.$$" && """
    '[ "$(wc -c <"$1.$$")" -eq "$3" ] && chmod "$2" "$1.$$" && mv -f "$1.$$" "$1"'
)
_GET = f'[ -e "$1" ] || exit {_NO_FILE}; exec cat "$1"'
# Verbs of the agent that start nothing where its processes have not run.
_AFTER_THE_END = {"attach", "checkpoint", "checkpoints", "clean-up", "files", "prune", "stop", "tail"}
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
    done = login.run([*_CLEAN, *words], data=data, limit=_LIMIT)
    if done.status:
        said = last_line(done.errors.decode(errors="replace"), f"exit status {done.status}")
        name = words[0] if words[0] != "sh" else "sbatch"
        error = TimedOut if any(words in said for words in _SILENT) else CheckFailed
        raise error(f"{name} on {login.name}: {said}", f"see what {name} says there")
    return done.output.decode(errors="replace")


def find_job(login: Connector, *, name: str = "", job: int = 0) -> SlurmJob | None:
    """Return the job of this name or id; None if Slurm knows none any more. Raises CheckFailed."""
    which = ["--me", f"--name={name}"] if name else [f"--jobs={job}"]  # others may give their jobs any name
    try:
        listed = slurm(login, "squeue", "--noheader", "--states=all", *which, "--format=%A|%T|%r|%S|%P|%N")
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


def long_step(python: str, container: str, step: str, idle: float) -> list[str]:
    """Return the command of the long step of this name on each node."""
    return _module(python, container, "step", step, f"{idle:g}")


def notify(python: str, container: str, step: str) -> list[str]:
    """Return the command that, on a node of the allocation, asks the agents there to stop their job."""
    return _module(python, container, "in-step", step)


def in_step(python: str, container: str, job: int, step: str, nodes: Iterable[str], *words: str) -> list[str]:
    """Return the srun that has the long step of this name, on each of these nodes of Slurm's job, run a command."""
    names = [*nodes]
    srun = [*_CLEAN, "srun", f"--jobid={job}", "--overlap", "--quiet", *PLAIN]
    srun += [f"--nodelist={','.join(names)}", f"--nodes={len(names)}", f"--ntasks={len(names)}", "--ntasks-per-node=1"]
    return [*srun, *_module(python, container, "in-step", step, *words)]


def _module(python: str, container: str, verb: str, *words: str) -> list[str]:
    """The command that runs a verb of the agent, in a container if there is one. A shell of the node expands ~."""
    return _contained(container, module_command(python, "geomx_cli.agent", verb, *words))


def _contained(container: str, command: Sequence[str]) -> list[str]:
    program, *rest = command
    if program.startswith("~/"):
        command = ["sh", "-c", 'exec "$HOME/$0" "$@"', program.removeprefix("~/"), *rest]
    if container.startswith("~/"):
        return ["sh", "-c", 'exec apptainer exec "$HOME/$0" "$@"', container.removeprefix("~/"), *command]
    return ["apptainer", "exec", container, *command] if container else [*command]


def own_errors(errors: bytes) -> bytes:
    """Return the lines of stderr that are the command's own. srun adds others, such as one with the exit status."""
    lines = errors.splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith((b"srun: ", b"slurmstepd: ")))


class _StepChannel:
    """The channel of a command in a job step."""

    def __init__(self, channel: Channel) -> None:
        self.send, self.receive, self.close = channel.send, channel.receive, channel.close
        self._channel = channel

    def errors(self) -> str:
        """See Channel.errors. They are srun's if the command has printed none: it may not have run."""
        text = self._channel.errors()
        return own_errors(text.encode()).decode() or text


class SlurmConnector:
    """Runs commands on a node of an allocation. After the end of the allocation, those that only read files or stop
    processes run on its login node. That has the files of jobs if `state_dir` is on a file system that all share.
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
            return self._login.run(self._on_login(argv), data=data, limit=limit)
        done = self._login.run(self._command(argv), data=data, limit=limit)
        if done.status and (done.status == _NO_STEP or b"srun: error:" in done.errors):
            self._alive_until = 0.0
            if not self._has_node():
                return self._login.run(self._on_login(argv), data=data, limit=limit)
            if done.status == _NO_STEP or b"task 0:" not in done.errors:
                said = last_line(done.errors.decode(errors="replace"), "srun failed")
                hint = f"see what srun --jobid={self._access.job} --overlap hostname says on {self._login.name}"
                raise HostUnreachable(f"host {self.name}: {said}", hint)
        return Completed(done.status, done.output, own_errors(done.errors))

    def open(self, argv: Sequence[str]) -> Channel:
        """See Connector.open."""
        self._alive_until = 0.0
        if not self._has_node():
            return self._login.open(self._on_login(argv))
        return _StepChannel(self._login.open(self._command(argv)))

    def put(self, path: str, data: bytes, mode: int = 0o600) -> None:
        """See Connector.put."""
        words = ["sh", "-c", _PUT, "sh", path, f"{mode:o}", str(len(data))]
        done = self.run(words, data=data, limit=_LIMIT + len(data) / _SLOWEST)
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
        return in_step(self.python, access.container, access.job, access.step, [access.node], *argv)

    def _on_login(self, argv: Sequence[str]) -> list[str]:
        """Return the command as the login node runs it. Raises HostUnreachable for one that is not for the files."""
        words = [*argv]  # as a connector's user gives them
        is_agent = words[1:4] == module_command("", "geomx_cli.agent")[1:]
        if not (words[0] == "cat" or words[:3] == ["sh", "-c", _GET] or (is_agent and words[4] in _AFTER_THE_END)):
            what = f"host {self.name}: its allocation has ended"
            raise HostUnreachable(what, f"see sacct -j {self._access.job} on {self._login.name}, and launch again")
        return _contained(self._access.container, words) if is_agent else words

    def _has_node(self) -> bool:
        now = time.monotonic()
        if now < self._alive_until:
            return True
        if not _AT_ONCE.acquire(timeout=_LIMIT):
            raise TimedOut(f"host {self.name}: squeue did not end within {_LIMIT:g} s", "see whether Slurm answers")
        try:
            job = find_job(self._login, job=self._access.job)
        except CheckFailed as error:
            raise HostUnreachable(f"host {self.name}: {error.message}", error.hint) from None
        finally:
            _AT_ONCE.release()
        if job is None or not job.has_nodes:
            return False
        self._alive_until = now + _FRESH
        return True
