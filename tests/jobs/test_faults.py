"""`geomx launch` with the real roles and real scripts: every failure is named, and nothing is left behind.

tests/jobs/test_launch_failures.py has more cases, with stand-ins for the roles.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cluster import ROOT
from desk import Desk, Launch
from rehearsal import Rehearsal

pytestmark = pytest.mark.processes
ROUNDS = ["--", "python", str(ROOT / "tests" / "scripts" / "rounds.py")]
CLUSTER = ["--parties", "2", "--workers", "1", "--topology", "central"]
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


VARIABLES = {"OUT": "{rank}.npz", "ROUNDS": "1000000", "SIZES": "2000,10", "SLOW": "0.05"}


def in_training(job: Launch) -> bool:
    """Whether the server of party A reports completed rounds."""
    path = job.directory / "events" / "A-server-0.jsonl"
    lines = path.read_text().splitlines()[:-1] if path.exists() else []
    return any(json.loads(line).get("round", 0) > 0 for line in lines)


def assert_failed(job: Launch, *texts: str) -> None:
    """Launch has printed all these texts, and left nothing but logs."""
    assert job.finish() == 1, job.errors
    for text in texts:
        assert text in job.errors
    job.assert_clean()


Start = Callable[..., Launch]


@pytest.fixture
def start(desk: Desk) -> Start:
    """Starts jobs."""
    return lambda *arguments, **variables: desk.train(*CLUSTER, *arguments, **{**VARIABLES, **variables})


def hit(folder: Path, name: str, number: signal.Signals) -> Launch:
    """A job, after its end, of which one process got a signal during training."""
    of_master = name == "central/worker:0"
    gates = folder / "gates"
    gates.mkdir(parents=True)
    (gates / "declare").touch()  # the master waits at its next gate, "leave": without it, it ends before the signal
    variables = {**VARIABLES, "GATES": str(gates)} if of_master else VARIABLES
    job = Desk(folder).train(*CLUSTER, "--silence", "5s", "--lease", "10s", "--restarts", "0", *ROUNDS, **variables)
    try:
        job.wait_for(lambda: job.started(name) if of_master else in_training(job))
        pid = job.pid(name)
        os.kill(pid, number)
        job.wait_for(lambda: {*job.pids()} <= {pid, job.process.pid})
        job.finish()
        return job
    finally:
        job.end()


ROLES = (
    "central/global_scheduler:0", "central/global_server:0", "central/scheduler:0", "central/worker:0",
    "A/scheduler:0", "A/server:0", "A/worker:0",
)  # fmt: skip
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
STOPPED = ("central/global_server:0", "A/worker:0")
LOST = [*((name, KILL) for name in ROLES), *((name, STOP) for name in STOPPED)]


def test_lost_processes_are_named(tmp_path: Path) -> None:
    """Several jobs at a time, as each mostly waits."""
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(hit, tmp_path / f"hit{index}", *case) for index, case in enumerate(LOST)]
    for (name, number), job in zip(LOST, jobs, strict=True):
        assert_named(job.result(), name, number)
        job.result().desk.close()


def assert_named(job: Launch, name: str, number: signal.Signals) -> None:
    """The lost process is the one at fault."""
    party, role = name.split("/")
    role, rank = role.split(":")
    who = f"{name} ({role.replace('_', ' ')} {rank} of party {party}, on host {party}) failed first"
    cause = "was killed by SIGKILL" if number == KILL else "was stopped (SIGSTOP)"
    tail = ["the end of its log", "0 0 1 2 0"] if name == "A/worker:0" else []
    log = f"{job.directory}/logs/{party}-{role}-{rank}.log"
    assert_failed(job, f"{who}: it {cause}", log, *tail)


@pytest.mark.parametrize("times", [1, 2])
def test_interrupt(start: Start, times: int) -> None:
    job = start(*ROUNDS)
    job.wait_for(lambda: in_training(job))
    for _ in range(times):
        os.killpg(job.process.pid, signal.SIGINT)
    assert job.finish() == 130
    job.assert_clean()


def test_script_that_raises_on_one_worker(start: Start, tmp_path: Path) -> None:
    fault, script = 'raise ValueError("the data set is not there")', tmp_path / "train.py"
    script.write_text(STORE.format(rounds=1_000_000, fault=fault))
    assert_failed(
        start("--", "python", str(script)),
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
    assert_failed(job, "B/worker:0 (worker 0 of party B, on host B)", *texts)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("exec('def (:')", "SyntaxError: invalid syntax"),
        ("print('I do not know about stores')", "still waits for workers to join"),
    ],
    ids=["no python", "no store"],
)
def test_script_that_cannot_train(start: Start, tmp_path: Path, text: str, says: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert_failed(start("--", "python", str(script)), "failed first", says)


def test_script_that_just_ends_is_done(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(STORE.format(rounds=10, fault="pass"))
    job = start("--json", "--", "python", str(script))
    assert job.finish() == 0, job.errors
    assert json.loads(job.output)["rounds"] == 10
    assert "0%" not in job.errors, "a script does not say how far it is"
    job.assert_clean()


def test_script_that_is_stuck_on_one_worker_is_named(start: Start) -> None:
    assert_failed(
        start("--patience", "4s", *ROUNDS, FAULT="time.sleep(1000)"),
        "B/worker:0 (worker 0 of party B, on host B) failed first: it was declared lost by ",
        "B/worker:0 has not contributed to round 22 for ", "is it stuck or out of step?",
        "its log is", "B-worker-0.log",
    )


def test_party_that_pauses_goes_on(start: Start) -> None:
    job = start(*ROUNDS, ROUNDS="200", SLOW="0.01")
    job.wait_for(lambda: in_training(job))
    party = [job.pid(f"A/{role}:0") for role in ("scheduler", "server", "worker")]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in party:
            os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(12)
    assert job.finish() == 0, job.errors
    job.assert_clean()


@pytest.mark.parametrize("topology", ["central", "spread", "flat"])
def test_emulated_links_carry_everything_to_the_end(desk: Desk, topology: str) -> None:
    words = (*CLUSTER, "--job-dir", "job", "--topology", topology, "--wan", "50mbit,60ms", *ROUNDS)
    Rehearsal(desk, *words, **VARIABLES | {"ROUNDS": "10"}).finish()


def test_job_directory_that_cannot_be_written(start: Start) -> None:
    job = start("--job-dir", "/proc/job", *ROUNDS)
    assert job.finish() == 5
    assert "cannot write to /proc/job: No such file or directory" in job.errors
    assert "another --job-dir" in job.errors


def test_mxnet_that_is_missing(start: Start, tmp_path: Path) -> None:
    (tmp_path / "mxnet.py").write_text("raise ModuleNotFoundError(\"No module named 'mxnet'\", name='mxnet')")
    script = tmp_path / "train.py"
    script.write_text("import mxnet")
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    assert_failed(start("--", "python", str(script), PYTHONPATH=paths), "No module named 'mxnet'")
