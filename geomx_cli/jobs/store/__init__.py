"""A job's directory: the same layout, at the same path, on the control machine and on each host.

    plan.json, inventory.json the plan, without keys, and its machines (control machine)
    state.json                the job's state as known to the control machine (job_state.py)
    hosts/HOST/agent.json     the host's part of the plan
    hosts/HOST/agent-state.json, agent.log      the processes its agent has started, and its log
    events/, logs/            one file per process
    keys/                     mode 0700, one file of mode 0600 per process; removed at the end

Unix sockets have a separate folder, because their paths must be short; it is removed at the end as well.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.core import env_names
from geomx_cli.core.errors import CheckFailed, DoneInPart, GeomxError, InvalidSettings
from geomx_cli.core.module_command import module_command
from geomx_cli.core.private import make_private
from geomx_cli.core.root_cause import describe_status
from geomx_cli.core.untrusted import last_line
from geomx_cli.hosts import Connector, File
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.store import job_state
from geomx_cli.plan import JobSpec, Plan
from geomx_cli.plan.job_paths import complete, jobs_folder
from geomx_cli.ps.net import security

__all__ = ["Job"]

_CLEANUP_LIMIT = 20.0


@dataclass(frozen=True)
class Job:
    """The paths of one job. The constructor does not access the disk."""

    id: str
    directory: Path
    sockets: Path
    keys: Path

    @classmethod
    def of(cls, spec: JobSpec) -> "Job":
        """Return the job of `spec`; missing fields are completed as in `plan.job_paths`."""
        whole = complete(spec)
        return cls(whole.job, Path(whole.job_dir), Path(whole.socket_dir), Path(whole.key_dir))

    @property
    def logs(self) -> Path:
        """The folder with the processes' output."""
        return self.directory / "logs"

    def complete(self, spec: JobSpec) -> JobSpec:
        """Return `spec` with this job's id and paths."""
        job_dir, socket_dir, key_dir = str(self.directory), str(self.sockets), str(self.keys)
        return replace(spec, job=self.id, job_dir=job_dir, socket_dir=socket_dir, key_dir=key_dir)

    def host_specs(self, plan: Plan, working_dirs: Mapping[str, str], lease: float) -> dict[str, HostSpec]:
        """Return each host's part of the plan. `working_dirs`: working directory of the processes per host; `lease`:
        seconds that they continue without the control machine, 0 for unlimited.
        """
        clear = ("PORT", *env_names.of_options())
        return {
            host: HostSpec(
                job=self.id,
                host=host,
                job_dir=plan.job_dirs[host],
                sockets=plan.socket_dirs[host],
                socket=f"{plan.socket_dirs[host]}/agent-{index}.sock",
                working_dir=working_dirs[host],
                lease=lease,
                silence=float(plan.spec.options["silence"]),
                clear=clear,
                tasks=tuple(Task(process.name, process.argv, process.env) for process in plan.on_host(host)),
            )
            for index, host in enumerate(plan.hosts)
        }

    def key_files(self, plan: Plan) -> dict[str, dict[str, File]]:
        """Return host -> path -> key file for its processes. Every call generates new keys."""
        rings = security.generate(self.id, {process.name: plan.callers.get(process.name) for process in plan.processes})
        return {
            host: {
                process.env["GEOMX_KEY_FILE"]: File(rings[process.name])
                for process in plan.on_host(host)
                if "GEOMX_KEY_FILE" in process.env
            }
            for host in plan.hosts
        }

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the directory on the control machine for this process. If the body fails before there is a plan, the
        directory is removed. A GeomxError is recorded in state.json.

        Raises InvalidSettings if the directory has another job or anything else, CheckFailed if it cannot be written,
        or is writable for other users.
        """
        made = not self.directory.exists()
        with self._writing():
            self.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
            self._refuse_others()
            make_private(self.directory)
        self._remember()
        try:
            job_state.begin(self.directory)
            yield
        except GeomxError as error:
            job_state.fail(self.directory, error)
            raise
        finally:
            if not (self.directory / "plan.json").exists():
                self._forget(folder=made)

    def write_plan(self, plan: Plan, inventory: Inventory) -> None:
        """Write plan.json and inventory.json on the control machine. Raises as `claimed` does."""
        with self._writing():
            self.directory.mkdir(parents=True, mode=0o700, exist_ok=True)
            self._refuse_others()
            _write_new(self.directory / "plan.json", json.dumps(plan.to_json(), indent=1))
            _write_new(self.directory / "inventory.json", inventory.model_dump_json(indent=1))
        self._remember()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            hint = "choose a new --job-dir, or an empty one"
            raise InvalidSettings(f"{self.directory} has a job already", hint) from None
        except OSError as error:
            hint = "choose another --job-dir, or make room there"
            raise CheckFailed(f"cannot write to {self.directory}: {error.strerror}", hint) from None

    def _refuse_others(self) -> None:
        """A state without a plan is our own, or belongs to a launch that was killed."""
        entry = next((entry for entry in self.directory.iterdir() if entry.name != job_state.FILE_NAME), None)
        before = job_state.JobState.read(self.directory)
        if before is not None and before.followed and before.pid != os.getpid():
            raise InvalidSettings(f"{self.directory} has a job already", "choose a new --job-dir, or an empty one")
        if entry is not None:
            has_plan = (self.directory / "plan.json").exists()
            what = "has a job already" if has_plan else f"is not empty: it has {entry.name}"
            raise InvalidSettings(f"{self.directory} {what}", "choose a new --job-dir, or an empty one")

    def _remember(self) -> None:
        """Register a job whose directory is elsewhere in the jobs folder. Failures are ignored."""
        entry = jobs_folder() / self.id
        if entry != self.directory:
            with suppress(OSError):
                entry.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
                entry.symlink_to(self.directory)

    def _forget(self, *, folder: bool) -> None:
        entry = jobs_folder() / self.id
        with suppress(OSError):
            (self.directory / job_state.FILE_NAME).unlink(missing_ok=True)
            if entry.is_symlink():
                entry.unlink()
            if folder:
                self.directory.rmdir()

    @staticmethod
    def clean_up(host: Connector, directory: str) -> None:
        """End the leftover processes of a killed or hung agent on `host`, and remove its key files and sockets.
        `directory`: the job's directory on that host.

        Raises DoneInPart if something cannot be ended, HostUnreachable or TimedOut if the host does not answer.
        """
        done = host.run(module_command(host.python, "geomx_cli.agent", "clean-up", directory), limit=_CLEANUP_LIMIT)
        if done.status == 0:
            return
        pids = done.output.decode(errors="replace").strip()
        if done.status == 1 and pids.replace(" ", "").isdecimal():
            raise DoneInPart(f"processes still running on {host.name}: {pids}", "end them by hand")
        words = last_line(done.errors.decode(errors="replace"), describe_status(done.status))
        hint = f"see that {host.python} -m geomx_cli.agent works there, then run geomx stop"
        raise DoneInPart(f"could not check {host.name} for leftover processes: {words}", hint)


def _write_new(path: Path, text: str) -> None:
    """Write with mode 0600, whatever the folder's mode: an inventory may have secrets in its "env"."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
