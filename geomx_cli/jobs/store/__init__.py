"""A job's directory: the same layout, at the same path, on the control machine and on each host.

    plan.json, inventory.json the plan, without keys, and its machines (control machine)
    state.json                the job's state as known to the control machine (job_state.py)
    hosts/HOST/agent.json     the host's part of the plan
    hosts/HOST/agent-state.json, agent.log      the processes its agent has started, and its log
    hosts/HOST/agent.lock     held by the agent and its keeper, which it names
    hosts/HOST/agent-end.jsonl      messages of an agent that has ended, if no control machine has had them
    events/, logs/            one file per process
    outputs/PROCESS/          what it has saved in GEOMX_OUTPUT_DIR
    start/                    what the workers begin from, in a job with other numbers than the job before it
    keys/                     mode 0700, one file of mode 0600 per process; removed at the end

Unix sockets have a separate folder, because their paths must be short; it is removed at the end as well.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from geomx_cli.core.conventions import START_FOLDER
from geomx_cli.core.errors import CheckFailed, GeomxError, InvalidSettings
from geomx_cli.core.files import make_folders, make_private, write_atomic
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.store import job_state
from geomx_cli.plan import Plan

__all__ = ["JobDirectory"]


@dataclass(frozen=True)
class JobDirectory:
    """The directory of job `id` on the control machine, as launch writes it. The constructor does not access the disk.
    """

    id: str
    path: Path

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Claim the directory for this process. If the body fails before there is a plan, the directory is removed. A
        GeomxError is recorded in state.json.

        Raises InvalidSettings if the directory has another job or anything else, CheckFailed if it cannot be written,
        or is writable for other users.
        """
        made = not self.path.exists()
        with self._writing():
            make_folders(self.path)
            self._refuse_others()
            make_private(self.path)
        self._remember()
        try:
            job_state.follow(self.path)
            yield
        except GeomxError as error:
            job_state.fail(self.path, error)
            raise
        finally:
            if not (self.path / "plan.json").exists():
                self._forget(folder=made)

    def write_plan(self, plan: Plan, inventory: Inventory) -> None:
        """Write plan.json and inventory.json. Raises as `claimed` does."""
        with self._writing():
            make_folders(self.path)
            self._refuse_others()
            _write_new(self.path / "plan.json", json.dumps(plan.to_json(), indent=1))
            _write_new(self.path / "inventory.json", json.dumps(msgspec.to_builtins(inventory), indent=1))
        self._remember()

    def write_start(self, files: Mapping[str, bytes]) -> None:
        """Write what the workers begin from, if there is anything, for this machine's hosts and for later jobs that go
        on from this one. Raises as `claimed` does.
        """
        with self._writing():
            for name, content in files.items():
                make_folders(self.path / START_FOLDER)
                write_atomic(self.path / START_FOLDER / name, content)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except FileExistsError:
            hint = "choose a new --job-dir, or an empty one"
            raise InvalidSettings(f"{self.path} has a job already", hint) from None
        except OSError as error:
            hint = "choose another --job-dir, or make room there"
            raise CheckFailed(f"cannot write to {self.path}: {error.strerror}", hint) from None

    def _refuse_others(self) -> None:
        """A state without a plan is our own, or belongs to a launch that was killed."""
        entry = next((entry for entry in self.path.iterdir() if entry.name != job_state.FILE_NAME), None)
        before = job_state.JobState.read(self.path)
        if before is not None and before.followed and before.pid != os.getpid():
            raise InvalidSettings(f"{self.path} has a job already", "choose a new --job-dir, or an empty one")
        if entry is not None:
            has_plan = (self.path / "plan.json").exists()
            what = "has a job already" if has_plan else f"is not empty: it has {entry.name}"
            raise InvalidSettings(f"{self.path} {what}", "choose a new --job-dir, or an empty one")

    def _remember(self) -> None:
        """Register a job whose directory is elsewhere in the jobs folder. Failures are ignored."""
        entry = jobs_folder() / self.id
        if entry != self.path:
            with suppress(OSError):
                make_folders(entry.parent)
                entry.symlink_to(self.path)

    def _forget(self, *, folder: bool) -> None:
        entry = jobs_folder() / self.id
        with suppress(OSError):
            (self.path / job_state.FILE_NAME).unlink(missing_ok=True)
            if entry.is_symlink():
                entry.unlink()
            if folder:
                self.path.rmdir()


def _write_new(path: Path, text: str) -> None:
    """Write with mode 0600, whatever the folder's mode: an inventory may have secrets in its "env"."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
