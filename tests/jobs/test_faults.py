"""`geomx launch` with the real roles and real scripts: every failure is named, and nothing is left behind.

tests/jobs/test_launch_failures.py has more cases, with stand-ins for the roles.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cluster import ROOT

pytestmark = pytest.mark.processes
GEOMX = [sys.executable, "-c", "import sys; from geomx_cli.cli import main; sys.exit(main())", "launch"]
ROUNDS = ["--", "python", str(ROOT / "tests" / "scripts" / "rounds.py")]
CLUSTER = ["--parties", "2", "--workers", "1"]
MARK = "FAULT_TEST"
LIMIT = 60.0
STORE = """
import os, sys, mxnet as mx
kv = mx.kv.create("dist_sync")
x = mx.nd.ones((4,))
kv.init(0, x)
if kv.is_master_worker:
    sys.exit()
for number in range({rounds}):
    kv.push(0, x)
    kv.pull(0, out=x)
    x.wait_to_read()
    if number == 20 and os.environ["GEOMX_PROCESS"] == "B/worker:0":
        {fault}
"""


@dataclass
class Job:
    """One `geomx launch` and its processes, found by a variable that all of them inherit."""

    folder: Path
    arguments: Sequence[str]
    variables: dict[str, str] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.directory = self.folder / "job"
        # Socket paths must be short.
        self.temporary = Path(tempfile.mkdtemp(prefix="g", dir="/tmp"))
        self.process = subprocess.Popen(
            [*GEOMX, "--job-dir", str(self.directory), *self.arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={
                **{name: text for name, text in os.environ.items() if not name.startswith(("DMLC_", "GEOMX_"))},
                "PYTHONPATH": str(ROOT), MARK: self.mark, "TMPDIR": str(self.temporary),
                "OUT": str(self.folder / "{rank}.npz"), "ROUNDS": "1000000", "SIZES": "2000,10", "SLOW": "0.01",
                **self.variables,
            },
        )  # fmt: skip

    def pids(self) -> set[int]:
        """All running processes of the job, launch included."""
        entry, found = f"{MARK}={self.mark}".encode(), set()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                ended = (path / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
                if not ended and entry in (path / "environ").read_bytes().split(b"\0"):
                    found.add(int(path.name))
            except OSError:
                continue
        return found

    def pid(self, name: str) -> int:
        """The pid of a process of the plan, of "agent HOST", or of "launch"; 0 if it has not been started."""
        if name == "launch":
            return self.process.pid
        for path in self.directory.glob("hosts/*/agent-state.json"):
            state = json.loads(path.read_bytes())
            if name == f"agent {path.parent.name}":
                return int(state["agent"][0])
            if name in state["processes"]:
                return int(state["processes"][name][0])
        return 0

    def in_training(self) -> bool:
        """Whether the server of party A reports completed rounds."""
        path = self.directory / "events" / "A-server-0.jsonl"
        lines = path.read_text().splitlines()[:-1] if path.exists() else []
        return any(json.loads(line).get("round", 0) > 0 for line in lines)

    def wait_for(self, condition: Callable[[], object], limit: float) -> None:
        """Wait until `condition` is true."""
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, f"not within {limit} s:\n{self.stop()}"
            time.sleep(0.05)

    def finish(self, limit: float = 90.0) -> "Job":
        """Wait for launch to end."""
        self.output, self.errors = self.process.communicate(timeout=limit)
        self.status = self.process.returncode
        return self

    def stop(self) -> str:
        """Kill everything, in whatever state; returns launch's output."""
        while pids := self.pids():
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        if not self.process.stderr or self.process.stderr.closed:
            return self.errors
        return self.process.communicate()[1]

    def assert_failed(self, *texts: str) -> None:
        """Launch has printed all these texts, and left nothing but logs."""
        assert self.status == 1, self.errors
        for text in texts:
            assert text in self.errors
        self.assert_clean()

    def assert_clean(self) -> None:
        """No process, key file or socket is left."""
        assert not self.pids(), self.errors
        assert not (self.directory / "keys").exists()
        assert not list(self.temporary.iterdir())


Start = Callable[..., Job]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts jobs; their remaining processes are killed at the end of the test."""
    jobs: list[Job] = []

    def begin(*arguments: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path, [*CLUSTER, *arguments], variables))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.stop()
        job.temporary.rmdir()


def hit(folder: Path, name: str, number: signal.Signals) -> Job:
    """A job, after its end, of which one process got a signal during training."""
    job = Job(folder, [*CLUSTER, "--silence", "5s", "--lease", "10s", *ROUNDS])
    try:
        # The master is done before training starts: send the signal as soon as it runs.
        job.wait_for(lambda: job.pid(name) if name == "central/worker:0" else job.in_training(), 60)
        pid = job.pid(name)
        os.kill(pid, number)
        job.wait_for(lambda: job.pids() <= {pid, job.process.pid}, LIMIT)
        return job.finish()
    finally:
        job.stop()


ROLES = (
    "central/global_scheduler:0", "central/global_server:0", "central/scheduler:0", "central/worker:0",
    "A/scheduler:0", "A/server:0", "A/worker:0",
)  # fmt: skip
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STOPPED = ("central/global_server:0", "A/worker:0")
LOST = [*((name, KILL) for name in ROLES), *((name, STOP) for name in STOPPED)]
Hits = dict[tuple[str, signal.Signals], Future[Job]]


@pytest.fixture(scope="module")
def hits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hits]:
    """All of them, several at a time: each mostly waits."""
    with ThreadPoolExecutor(6) as pool:
        jobs = {case: pool.submit(hit, tmp_path_factory.mktemp("hit"), *case) for case in LOST}
        yield jobs
    for job in jobs.values():
        if job.exception() is None:
            job.result().temporary.rmdir()


@pytest.mark.parametrize(("name", "number"), LOST, ids=lambda part: getattr(part, "name", part))
def test_lost_process_is_named(hits: Hits, name: str, number: signal.Signals) -> None:
    party, role = name.split("/")
    role, rank = role.split(":")
    who = f"{name} ({role.replace('_', ' ')} {rank} of party {party}, on host {party}) failed first"
    cause = "was killed by SIGKILL" if number == KILL else "was stopped (SIGSTOP)"
    tail = ["the end of its log", "0 0 1 2 0"] if name == "A/worker:0" else []
    job = hits[name, number].result()
    log = f"{job.directory}/logs/{party}-{role}-{rank}.log"
    job.assert_failed(f"{who}: it {cause}", log, *tail)


@pytest.mark.parametrize("times", [1, 2])
def test_interrupt(start: Start, times: int) -> None:
    job = start(*ROUNDS)
    job.wait_for(job.in_training, 60)
    for _ in range(times):
        os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish(LIMIT).status == 130
    job.assert_clean()


def test_script_that_raises_on_one_worker(start: Start, tmp_path: Path) -> None:
    fault, script = 'raise ValueError("the data set is not there")', tmp_path / "train.py"
    script.write_text(STORE.format(rounds=1_000_000, fault=fault))
    start("--", "python", str(script)).finish().assert_failed(
        "B/worker:0 (worker 0 of party B, on host B)", "the script raised ValueError: the data set is not there",
        fault, "ValueError: the data set is not there",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("import sys; sys.exit(3)", ["it exited with status 3"]),
        ("os._exit(0)", ["it ended with status 0 but did not leave the job"]),
        ("os.abort()", ["it crashed (SIGABRT)", "the end of its log"]),
    ],
    ids=["exits", "vanishes", "aborts"],
)
def test_script_that_fails_on_one_worker(start: Start, fault: str, texts: list[str]) -> None:
    job = start("--silence", "6s", *ROUNDS, FAULT=fault)  # a process that vanishes is detected by silence at the latest
    job.finish().assert_failed("B/worker:0 (worker 0 of party B, on host B)", *texts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def (:", "SyntaxError: invalid syntax"),
        ("print('I do not know about stores')", "still waits for workers to join"),
    ],
    ids=["no python", "no store"],
)
def test_script_that_cannot_train(start: Start, tmp_path: Path, text: str, says: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    start("--", "python", str(script)).finish().assert_failed("failed first", says)


def test_script_that_just_ends_is_done(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STORE.format(rounds=10, fault="pass"))
    job = start("--json", "--", "python", str(script)).finish()
    assert job.status == 0, job.errors
    assert json.loads(job.output)["rounds"] == 10
    assert "0%" not in job.errors, "a script does not say how far it is"
    job.assert_clean()


def test_script_that_is_stuck_on_one_worker_is_named(start: Start) -> None:
    start("--patience", "4s", *ROUNDS, FAULT="time.sleep(1000)").finish().assert_failed(
        "B/worker:0 (worker 0 of party B, on host B) failed first: it was declared lost by ",
        "B/worker:0 has not contributed to round 22 for ", "is it stuck or out of step?",
        "its log is", "B-worker-0.log",
    )


def test_party_that_pauses_goes_on(start: Start) -> None:
    job = start(*ROUNDS, ROUNDS="200")
    job.wait_for(job.in_training, 60)
    party = [job.pid(f"A/{role}:0") for role in ("scheduler", "server", "worker")]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in party:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(12)
    assert job.finish().status == 0, job.errors
    job.assert_clean()


@pytest.mark.parametrize("topology", ["central", "spread", "flat"])
def test_emulated_links_carry_everything_to_the_end(start: Start, topology: str) -> None:
    job = start("--topology", topology, "--wan", "50mbit,60ms", *ROUNDS, ROUNDS="10").finish()
    assert job.status == 0, job.errors
    job.assert_clean()


def test_job_directory_that_cannot_be_written(start: Start) -> None:
    job = start("--job-dir", "/proc/job", *ROUNDS).finish()
    assert job.status == 5
    assert "cannot write to /proc/job: No such file or directory" in job.errors
    assert "another --job-dir" in job.errors


def test_mxnet_that_is_missing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mxnet.py").write_text("raise ModuleNotFoundError(\"No module named 'mxnet'\", name='mxnet')")
    script = tmp_path / "train.py"
    script.write_text("import mxnet")
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    start("--", "python", str(script), PYTHONPATH=paths).finish().assert_failed("No module named 'mxnet'")
