"""Jobs without their launch: `geomx launch ARGUMENTS` plans, and the processes are forked here, without agents.

A process costs a fifth of one that an agent starts, and a job some two seconds less of CPU. Plan, environments, event
logs, outputs and result are those of a launch; preflight, agents and the copying of files have tests of their own.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import forks
from cluster import free_ports
from desk import Desk, finished, placed
from forks import Forked

from geomx_cli.agent.event_tail import EventTail
from geomx_cli.agent.host_spec import Task
from geomx_cli.agent.outputs import folder_of
from geomx_cli.commands.launch import launch as command
from geomx_cli.core import events
from geomx_cli.core.root_cause import Failure, first_cause
from geomx_cli.hosts import ports as reservation
from geomx_cli.inventory import Inventory
from geomx_cli.jobs.actions import launch as launching
from geomx_cli.jobs.actions.launch import host_specs, key_files
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Conclusion, Outcome, in_words
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.ports import choose


class Rehearsal:
    """A job whose processes run, with the part of desk.Launch's interface that concerns its results. Begins at once.

    imported: what workers are forked from, see forks.ForkServer; but those with the names `late` import their framework
    after our hook, as those of a user do. folder: the one in which the command is given. python: the one that runs all
    processes, of another environment than the test's.
    """

    def __init__(
        self, desk: Desk, *arguments: str, imported: str = "geomx", folder: Path | None = None,
        python: str = sys.executable, late: Container[str] = (), **variables: str,
    ) -> None:  # fmt: skip
        self.output = self.errors = ""
        self.began = time.monotonic()
        self.environment = {**desk.environment, **variables}
        with placed(self.environment, folder or desk.folder) as (_, said):
            inventory, spec = _asked(arguments)
            spec, _ = launching.prepared(replace(spec, python=python), ())
            self.plan = plan(inventory, spec)
            dirs, leases = launching.working_dirs(inventory, self.plan), dict.fromkeys(self.plan.hosts, 0.0)
            self._host_specs = host_specs(self.plan, inventory, dirs, leases)
        self.said = said.getvalue()
        self.directory = Path(self.plan.spec.job_dir)
        self.processes: dict[str, Forked] = {}
        desk.launches.append(self)
        _write_keys(self.plan)
        for sockets in set(self.plan.socket_dirs.values()):
            Path(sockets).mkdir(0o700, exist_ok=True)
        tasks = [(task, each.working_dir) for each in self._host_specs.values() for task in each.tasks]
        # Workers first: their fork server may have a framework to import, while others' limits would run.
        for task, folder_of_it in sorted(tasks, key=lambda item: self.plan.process(item[0].name).role != "worker"):
            self._start(task, folder_of_it, "geomx" if task.name in late else imported, python)

    def _start(self, task: Task, working_dir: str, imported: str, python: str) -> None:
        own = {name: text for name, text in self.environment.items() if not name.startswith(("DMLC_", "GEOMX_"))}
        env = {**own, **task.env, "GEOMX_SUPERVISED": "1"}  # as under an agent: the limits of a launched job
        assert forks.can_be_forked(task.argv, env, python), f"{task.name} would behave otherwise if forked: {task.argv}"
        log = self.directory / "logs" / f"{task.file_name}.log"
        for folder in (log.parent, folder_of(task)):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_light = self.plan.process(task.name).role != "worker" and python == sys.executable
        server = forks.server("geomx" if is_light else imported, python)
        self.processes[task.name] = server.start(task.argv[1:], env, Path(working_dir), log)

    @property
    def logs(self) -> str:
        """What all processes have written."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self.directory.glob("logs/*")))

    def statuses(self, limit: float = 240) -> dict[str, int | None]:
        """Wait for the job's end; returns exit statuses, None for what still runs after the limit."""
        end = time.monotonic() + limit
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        return {name: process.poll() for name, process in self.processes.items()}

    def finish(self, limit: float = 240) -> int:
        """Wait for the job's end, which must be a success; returns 0, and `output` is what launch --json prints."""
        statuses = self.statuses(limit)
        assert not any(status != 0 for status in statuses.values()), f"{statuses}\n{self.logs}"
        progress = Progress.of(self.plan, self.began)
        for task in (task for host_spec in self._host_specs.values() for task in host_spec.tasks):
            for fields in EventTail(self.directory / "events" / f"{task.file_name}.jsonl").read():
                if (event := events.parse(fields)) is not None:
                    progress.apply(task.name, event, time.monotonic() - (time.time() - event.time))
            progress.record_end(task.name, 0)
        concluded = Conclusion.of(self.plan, Outcome(), progress.totals(), time.monotonic() - self.began)
        self.output = json.dumps(concluded.result)
        self.errors = self.said + in_words(concluded.result)
        self.end()
        return 0

    def failure(self, limit: float = 240) -> Failure:
        """Wait for the job's end, which must be a failure; returns what launch would name, by what processes report."""
        statuses = self.statuses(limit)
        hosts: dict[str, str] = {}
        found: list[Failure] = []
        for host_spec in self._host_specs.values():
            for task in host_spec.tasks:
                hosts[task.name] = host_spec.host
                tail = EventTail(self.directory / "events" / f"{task.file_name}.jsonl")
                tail.read()
                if (told := tail.failure) is not None:
                    peer, hint = told.get("peer", ""), told.get("hint", "")
                    peer = "" if peer == task.name else peer
                    said = {name: told[name] for name in ("message", "observer", "missed", "seconds") if name in told}
                    found.append(Failure(task.name, host_spec.host, "failed", told["time"], hint, peer, **said))
        cause = first_cause(found, hosts, [name for name, status in statuses.items() if status == 0])
        assert cause is not None, f"{statuses}\n{self.logs}"
        return cause

    def finished(self) -> dict[str, dict[str, Any]]:
        """Each worker's final event."""
        return finished(self.directory)

    def end(self) -> None:
        """Kill what still runs, and remove its sockets."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for sockets in set(self.plan.socket_dirs.values()):
            shutil.rmtree(sockets, ignore_errors=True)


class _Asked(Exception):
    """Leaves `geomx launch` where it would prepare the hosts."""

    def __init__(self, inventory: Inventory, spec: JobSpec, options: object) -> None:
        self.inventory, self.spec = inventory, spec


def _asked(arguments: tuple[str, ...]) -> tuple[Inventory, JobSpec]:
    """The inventory and the job of `geomx launch ARGUMENTS`, on ports that only this test uses."""

    def leave(*given: Any) -> None:
        raise _Asked(*given)

    with mock.patch.object(launching, "launch", leave), mock.patch.object(reservation, "free_ports", free_ports):
        try:
            command.main([*arguments], standalone_mode=False)
        except _Asked as found:
            return choose(found.inventory, None), found.spec
    raise AssertionError("geomx launch has not planned a job")


def _write_keys(planned: Plan) -> None:
    for keys in key_files(planned).values():
        for path, file in keys.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            Path(path).touch(0o600)
            Path(path).write_bytes(file.data)
