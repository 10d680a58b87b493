"""The jobs launched from this machine: lookup, and what is known of them without contacting a host."""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from geomx_cli import hosts as ways
from geomx_cli.agent.processes import ProcessId
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.files import require_private
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.core.option import did_you_mean
from geomx_cli.core.typed import to_type
from geomx_cli.hosts import Connector
from geomx_cli.hosts.ssh.options import SshOptions
from geomx_cli.inventory import Inventory, validated
from geomx_cli.jobs.store.job_state import JobState
from geomx_cli.plan import Plan

__all__ = ["KnownJob", "UnknownJob", "all_jobs", "find", "in_preparation"]


class UnknownJob(InvalidSettings):
    """There is no such job."""


@dataclass(frozen=True)
class KnownJob:
    """A job, identified by its directory on the control machine. Files are read lazily."""

    id: str
    directory: Path
    started: float

    @classmethod
    def at(cls, directory: Path) -> "KnownJob | None":
        """Return the job in `directory`; None if there is none."""
        try:
            began = (directory / "plan.json").stat().st_mtime
        except OSError:
            return None
        state = JobState.read(directory)
        return cls(directory.name, directory, state.started if state else began)

    @cached_property
    def plan(self) -> Plan:
        """The job's plan. Raises InvalidSettings if plan.json is damaged."""
        fields = self._read("plan.json")
        try:
            return _plan(fields, self.directory)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise InvalidSettings(f"{self.directory}/plan.json is damaged: {what}", self._hint) from None

    @cached_property
    def inventory(self) -> Inventory:
        """The inventory as resolved before the start. Raises InvalidSettings if there is none: nothing was started."""
        return validated(self._read("inventory.json"))

    @cached_property
    def state(self) -> JobState | None:
        """The content of state.json at first access."""
        return JobState.read(self.directory)

    @property
    def state_shown(self) -> str:
        """See JobState.shown."""
        return self.state.shown if self.state else "orphaned"

    def directory_on(self, host: str) -> str:
        """Return the job's directory that the agent of `host` was given."""
        return f"{self.plan.job_dirs[host]}/hosts/{host}"

    def open_hosts(self, names: Iterable[str] | None = None) -> dict[str, Connector]:
        """Return a connector to each host, or to those in `names`. Connections are opened on first use."""
        options = SshOptions(notify=lambda text: print(text, file=sys.stderr))
        wanted = list(self.plan.hosts if names is None else names)
        return {name: ways.connector(self.inventory.host(name), sys.executable, options) for name in wanted}

    @property
    def what(self) -> str:
        """What the job runs, as "cnn by hfa" or "python train.py by diloco, int8": the network of the bundled training
        or the script, the algorithm, and the codec if there is one.
        """
        options = self.plan.spec.options
        trained = " ".join(self.plan.spec.script) or str(options.get("network", ""))
        how = ", ".join(str(options[name]) for name in ("algo", "compress") if options.get(name))
        return " by ".join(filter(None, (trained, how)))

    def to_json(self) -> dict[str, Any]:
        """What is known without contacting a host."""
        state = self.state
        result: Mapping[str, Any] = (state.result if state else None) or {}
        return {
            "job": self.plan.job,
            "started": self.started,
            "ended": state.ended if state else None,
            "state": self.state_shown,
            "exit_code": result.get("exit_code"),
            "hosts": list(self.plan.hosts),
            "what": self.what,
            "directory": str(self.directory),
            "result": dict(result) or None,
        }

    @property
    def _hint(self) -> str:
        return "restore the file; or end the job's agent on each host (pgrep -fa geomx_cli.agent) and remove the folder"

    def _read(self, name: str) -> Any:
        require_private(self.directory)
        try:
            return json.loads((self.directory / name).read_bytes())
        except FileNotFoundError:
            hint = "it ended before starting any process; see geomx jobs"
            raise InvalidSettings(f"job {self.id} has no {name}", hint) from None
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidSettings(f"{self.directory / name} cannot be read: {error}", self._hint) from None


def all_jobs() -> list[KnownJob]:
    """The jobs in the jobs folder, newest first. Dangling links are kept: a disk may be mounted again."""
    folder, found = jobs_folder(), []
    for entry in folder.iterdir() if folder.is_dir() else ():
        if (job := KnownJob.at(entry.resolve())) is not None:
            found.append(KnownJob(entry.name, job.directory, job.started))
    return sorted(found, key=lambda job: (job.started, job.id), reverse=True)


def in_preparation(name: str = "") -> tuple[str, ProcessId] | None:
    """Return the newest job in preparation by a launch on this machine whose id begins with `name`, and that launch."""
    folder, found = jobs_folder(), []
    for entry in folder.iterdir() if folder.is_dir() else ():
        state = None if (entry / "plan.json").exists() else JobState.read(entry)
        if state is not None and state.followed and entry.name.startswith(name):
            require_private(entry)
            found.append((state.started, entry.name, ProcessId(state.pid, state.pid_started)))
    return max(found)[1:] if found else None


def find(name: str = "") -> KnownJob:
    """Find a job by id, unique id prefix, or directory; without a name the newest running job, else the newest.
    Raises UnknownJob if there is none, InvalidSettings if there is more than one, or it is still being prepared.
    """
    if "/" in name or name == ".":
        job = KnownJob.at(Path(name).absolute())
        if job is None:
            raise UnknownJob(f"{name} is not a job directory: it has no plan.json", "see geomx jobs")
        return KnownJob(job.plan.job, job.directory, job.started)
    known = all_jobs()
    if not any(job.id.startswith(name) for job in known) and (preparing := in_preparation(name)) is not None:
        hint = "it can be seen once its processes start; geomx stop ends it"
        raise InvalidSettings(f"a launch is still preparing job {preparing[0]}", hint)
    if not known:
        raise UnknownJob(f"there are no jobs in {jobs_folder()}", "start one with geomx launch")
    if not name:
        running = [job for job in known if job.state_shown in ("running", "detached")]
        return (running or known)[0]
    found = [job for job in known if job.id == name] or [job for job in known if job.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidSettings(f"{len(found)} jobs begin with {name!r}", f"they are {_names(found)}")
    close = did_you_mean(name, (job.id for job in known)) or f"the newest are {_names(known)}"
    raise UnknownJob(f"there is no job {name!r}", f"{close}; see geomx jobs")


def _names(jobs: list[KnownJob]) -> str:
    return ", ".join(job.id for job in jobs[:5]) + (", ..." if len(jobs) > 5 else "")


def _plan(fields: Any, directory: Path) -> Plan:
    """Inverse of Plan.to_json, which omits what is needed only to start a job (base environment, ...). Raises KeyError,
    TypeError and ValueError for damaged fields. `directory`: where the job is found now.
    """
    names = ("job", "options", "socket_dir", "script", "script_digest", "script_warning")
    spec = {**{name: fields[name] for name in names}, "job_dir": str(directory)}
    links = [(link["dialler"], link["listener"]) for link in fields["links"]]
    found = to_type({**fields, "spec": spec, "links": links}, Plan)
    if not found.processes or not set(found.hosts) <= set(found.job_dirs):
        raise ValueError("it lacks processes, or their hosts' folders")
    return found
