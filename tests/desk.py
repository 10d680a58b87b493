"""A user's environment for tests: the `geomx` command, its own job folder, and jobs of stand-in programs.

All processes of a job carry a marker variable, by which they are found even if their parents have died.
"""

import contextlib
import getpass
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import forks
from cluster import ROOT, free_ports, until
from forking import Served
from sshd import Sshd

from geomx_cli import cli
from geomx_cli.agent import processes

STAND_IN = Path(__file__).with_name("stand_in.py")
GEOMX = (sys.executable, "-m", "geomx_cli")
# They start no process here.
LIGHT = {
    (verb,) for verb in ("compare", "draw", "fetch", "hosts", "init", "jobs", "logs", "status", "stop", "summarize")
}
MARK = "DESK_TEST"


@contextlib.contextmanager
def placed(environment: Mapping[str, str], folder: Path) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Run the block as if this process had been started with this environment in this folder; gives what it writes to
    stdout and stderr.
    """
    before, out, err = Path.cwd(), io.StringIO(), io.StringIO()
    path = [*environment.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
    with (
        mock.patch.dict(os.environ, environment, clear=True), mock.patch.object(sys, "path", path),
        mock.patch.object(tempfile, "tempdir", None), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err),
    ):  # fmt: skip
        os.chdir(folder)
        try:
            yield out, err
        finally:
            os.chdir(before)


def in_this_process(
    arguments: Sequence[str], environment: Mapping[str, str], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command as its own process would, without the imports; what it starts is another matter."""
    with placed(environment, folder) as (out, err):
        status = cli.main(arguments)
    return subprocess.CompletedProcess([*GEOMX, *arguments], status, out.getvalue(), err.getvalue())


def without_progress(text: str) -> str:
    """What a command has written to stderr, but for its lines while it is slow: "reading the inventory (2 s)"."""
    return re.sub(r"^.* \(\d+ s\)\n", "", text, flags=re.MULTILINE)


def finished(directory: Path) -> dict[str, dict[str, Any]]:
    """The final event of each worker of the job in this directory."""
    found = {}
    for path in directory.glob("events/*-worker-*.jsonl"):
        events = [json.loads(line) for line in path.read_text().splitlines()]
        for event in (event for event in events if event["event"] == "finished"):
            found[path.stem] = event
    return found


@dataclass
class Launch:
    """One `geomx launch` in its own process, and everything that it starts."""

    desk: "Desk"
    process: subprocess.Popen[str]
    mark: str
    output: str = ""
    errors: str = ""
    found: Path | None = None

    @property
    def directory(self) -> Path:
        """The job's directory on this machine; it does not exist before launch has begun."""
        for path in (self.desk.state / "geomx" / "jobs").glob("*/state.json") if self.found is None else ():
            with contextlib.suppress(OSError, ValueError):
                if json.loads(path.read_bytes())["pid"] == self.process.pid:
                    self.found = path.parent
        return self.found or self.desk.state / "none"

    @property
    def id(self) -> str:
        """The job's name."""
        return self.directory.name

    def pids(self) -> list[int]:
        """The pids of all its live processes, launch included."""
        return sorted(who.pid for who in processes.marked({MARK: self.mark}))

    def pid(self, name: str) -> int:
        """The pid of a process of the plan, of "agent HOST" or of "launch", which has been started."""
        pid = self.started(name)
        assert pid, f"{name} has not been started"  # a signal to pid 0 would go to the tests
        return pid

    def started(self, name: str) -> int:
        """As `pid`; 0 if it has not been started."""
        if name == "launch":
            return self.process.pid
        for path in self.desk.state_files("agent-state.json", self.id):
            fields = json.loads(path.read_bytes())
            if name == f"agent {path.parent.name}":
                return int(fields["agent"][0])
            if name in fields["processes"]:
                return int(fields["processes"][name][0])
        return 0

    def wait_for(self, condition: Callable[[], object], limit: float = 120) -> None:
        """Wait until `condition` is true; otherwise fail with launch's output."""
        until(condition, limit, lambda: f"{self.process.poll()} {self.end()}")

    def wait_until_running(self, count: int = 8) -> "Launch":
        """Wait until `count` processes have reported that they run, their agents know it, and launch holds no ports for
        them any more.
        """

        def known() -> int:
            contents = [json.loads(path.read_bytes()) for path in self.desk.state_files("status.json", self.id)]
            return sum("state" in one["newest"] for content in contents for one in content["processes"].values())

        def holds_ports() -> bool:
            return any(who.pid in self.pids() for who in processes.with_arguments("geomx_cli.probe"))

        self.wait_for(lambda: known() >= count and not holds_ports())
        return self

    def finish(self, limit: float = 240) -> int:
        """Wait for launch to end; returns its exit status."""
        if self.process.stdout and not self.process.stdout.closed:
            self.output, self.errors = self.process.communicate(timeout=limit)
        print(self.errors)  # helps if the exit status is unexpected
        return self.process.returncode

    def end(self) -> str:
        """Kill everything, in whatever state; returns launch's output."""
        alive = self.pids()
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for folder in Path("/dev/shm").glob(f"geomx-*-{self.id}-*"):
            assert alive, f"{folder} has outlived the job"
            shutil.rmtree(folder, ignore_errors=True)
        if self.process.stdout and not self.process.stdout.closed:
            self.output, self.errors = self.process.communicate()
        return self.errors

    def finished(self) -> dict[str, dict[str, Any]]:
        """Each worker's final event."""
        return finished(self.directory)

    def assert_clean(self) -> None:
        """No process, key file, socket or state of the job is left; agents may take a moment to exit."""
        self.wait_for(lambda: not self.pids(), 5)
        for kind in ("keys", "*.key", "*.key.*", "*.sock"):
            assert not self.desk.state_files(kind, self.id)
        assert not list(Path("/dev/shm").glob(f"geomx-*-{self.id}-*"))
        if len(self.desk.launches) == 1:
            assert not list(self.desk.temporary.iterdir())
        else:
            token = self.id.split("-")[-1]
            assert not [path for path in self.desk.temporary.rglob("*.sock") if token in str(path)]


@dataclass
class Desk:
    """Runs commands as `command` with `environment`; jobs are stored in `state`, on other machines as configured there.

    forks: whether processes may be forked, see forking.py; one test of each kind has them started as users do.
    """

    folder: Path
    command: Sequence[str] = GEOMX
    forks: bool = True
    environment: dict[str, str] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    commands: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self.state = self.folder / "state"
        self.temporary = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))  # socket paths must be short
        own = {name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))}
        own |= {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(self.state), "TMPDIR": str(self.temporary)}
        own["HOME"] = str(self.folder)  # no ssh_config of the user, but the data that are downloaded already
        own.setdefault("XDG_DATA_HOME", str(Path.home() / ".local" / "share"))
        # Stand-ins find the tests' Python by PATH.
        own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = own | self.environment

    def geomx(
        self, *arguments: str, cwd: Path | None = None, limit: float = 240, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; stderr as `without_progress`. A light one runs in this process, which has
        the imports done already, unless it would import others.
        """
        environment, folder = {**self.environment, **variables}, cwd or self.folder
        is_alone = threading.current_thread() is threading.main_thread() and environment["PYTHONPATH"] == str(ROOT)
        if self.command == GEOMX and arguments[:1] in LIGHT and is_alone:
            done = in_this_process(arguments, environment, folder)
        else:
            imported = "mxnet" if forks.imports_mxnet(arguments) else "geomx"
            with self._begun(arguments, environment, folder, imported) as process:
                try:
                    out, err = process.communicate(timeout=limit)
                finally:
                    process.kill()
            done = subprocess.CompletedProcess([*self.command, *arguments], process.returncode, out, err)
        done.stderr = without_progress(done.stderr)
        return done

    def start(self, *arguments: str, imported: str = "geomx", **variables: str) -> "subprocess.Popen[str]":
        """Start a command; it is killed when the desk is closed. imported: what it may be forked from, see
        forks.ForkServer.
        """
        process = self._begun(arguments, {**self.environment, **variables}, self.folder, imported, process_group=0)
        self.commands.append(process)
        return process

    def _begun(
        self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path, imported: str = "geomx",
        **others: Any,
    ) -> "subprocess.Popen[str]":  # fmt: skip
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        others |= {"env": environment, "cwd": folder, "text": True, "stdin": nothing, "stdout": pipe, "stderr": pipe}
        is_plain = self.command == GEOMX and environment["PYTHONPATH"] == str(ROOT)
        if self.forks and is_plain and forks.can_be_forked(GEOMX, environment):
            return Served(forks.server(imported), [*GEOMX[1:], *arguments], **others)
        return subprocess.Popen([*self.command, *arguments], **others)

    def json(self, *arguments: str) -> Any:
        """The output of a command with --json, which must succeed."""
        done = self.geomx(*arguments, "--json")
        assert done.returncode == 0, (done.returncode, done.stderr, done.stdout)
        return json.loads(done.stdout)

    def launch(
        self,
        *arguments: str,
        story: Mapping[str, str] | None = None,
        sites: Sequence[Sshd] = (),
        workers: int = 2,
        allocator: str = "none",
        keys: Mapping[str, Sequence[str]] | None = None,
    ) -> Launch:
        """Launch a job of stand-ins: a central party and party A with `workers` workers, one planned host each; each
        host behind one of the `sites`, or on a machine from the `allocator`. keys: further lines for hosts, by name.
        """
        mark = uuid.uuid4().hex
        file = self.inventory(mark, story, sites, workers, allocator, keys or {})
        return self._launched(mark, "--hosts", str(file), *arguments)

    def train(self, *arguments: str, imported: str = "mxnet", **variables: str) -> Launch:
        """Launch a job of the real roles in the directory "job", on this machine. imported: see `start`."""
        directory, mark = self.folder / "job", uuid.uuid4().hex
        launch = self._launched(mark, "--job-dir", str(directory), *arguments, imported=imported, **variables)
        launch.found = directory
        return launch

    def _launched(self, mark: str, *arguments: str, imported: str = "geomx", **variables: str) -> Launch:
        process = self.start("launch", *arguments, imported=imported, **{MARK: mark, **variables})
        self.launches.append(Launch(self, process, mark))
        return self.launches[-1]

    def inventory(
        self,
        mark: str,
        story: Mapping[str, str] | None = None,
        sites: Sequence[Sshd] = (),
        workers: int = 2,
        allocator: str = "none",
        keys: Mapping[str, Sequence[str]] = types.MappingProxyType({}),
    ) -> Path:
        """Write the inventory of a job of stand-ins."""
        python = self.folder / f"{mark}.sh"
        python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" {MARK}={mark} exec {sys.executable} {STAND_IN} "$@"\n')
        python.chmod(0o755)
        env = {"STORY": json.dumps({"*": "forever"} if story is None else story), "STAND_INS": str(workers + 1)}
        file = self.folder / f"{mark}.toml"
        file.write_text("\n".join(_inventory(str(python), env, sites, workers, allocator, keys)))
        return file

    def state_files(self, pattern: str, job: str = "") -> Sequence[Path]:
        """Files of all jobs, or of one, on all hosts of this test."""
        own = (self.state / "geomx" / "jobs" / job).resolve()
        # os.walk goes on where a folder vanishes meanwhile.
        found = [Path(folder, name) for folder, *names in os.walk(self.folder) for name in (*names[0], *names[1])]
        matching = [path for path in sorted(found) if path.match(pattern)]
        return [path for path in matching if not job or job in path.parts or own in path.parents]

    def close(self) -> None:
        """Kill everything."""
        for launch in self.launches:
            launch.end()
        for process in self.commands:
            process.kill()
            if process.stdout and not process.stdout.closed:
                process.communicate()
        shutil.rmtree(self.temporary)


def _inventory(
    python: str, env: Mapping[str, str], sites: Sequence[Sshd], workers: int, allocator: str,
    keys: Mapping[str, Sequence[str]],
) -> list[str]:  # fmt: skip
    """The lines of an inventory file."""
    ports = free_ports(6)
    variables = ", ".join(f"{name} = '{text}'" for name, text in env.items())
    lines = ['central = "central"']
    if sites:
        lines += ["[ssh]", f'client = "{sites[0].person.client}"']
    lines += ["[defaults]", f'python = "{python}"', f"env = {{ {variables} }}", f'allocator = "{allocator}"']
    for index, name in enumerate(("central", "A")):
        own = ports[3 * index : 3 * index + 3]
        lines += ["[[host]]", f'name = "{name}"', f'party = "{name}"', f"ports = {own}"]
        lines += keys.get(name, ())
        if name == "A":
            lines += [f"devices = {json.dumps(['cpu'] * workers)}"]
        if allocator != "none":
            continue
        lines += ['address = "127.0.0.1"']
        if not sites:
            lines += ["local = true"]
            continue
        site = sites[index]
        lines += [f'ssh = "{site.address}"', f"ssh_port = {site.port}", f'user = "{getpass.getuser()}"']
        lines += [f'key = "{site.person.key}"', f'fingerprint = "{site.fingerprint}"']
        lines += [f'state_dir = "{site.state_dir}"']
    return lines
