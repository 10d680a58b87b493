"""What an agent makes of a process that hangs, computes without a word, or ends without leaving the job."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from geomx_cli.agent import incarnation as module
from geomx_cli.agent import processes
from geomx_cli.agent.child import Child
from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.core.conventions import JobClock

pytestmark = pytest.mark.processes
SAY = """
import json, signal, sys
log = open(sys.argv[1], "a", buffering=1)
def say(**event): print(json.dumps(event), file=log)
"""


def begin(directory: Path, program: str, silence: float = 1.0) -> Child:
    """A process with an event log, under an agent of this patience."""
    (directory / "events").mkdir()
    log = directory / "events" / "one.jsonl"
    task = Task("one", (sys.executable, "-S", "-c", SAY + program, str(log)), {})
    spec = HostSpec(
        job="j", host="here", job_dir=str(directory), sockets="", socket="", working_dir="", clear=(), tasks=(task,),
        silence=silence,
    )  # fmt: skip
    child = Child(task, spec, JobClock(0.0))
    child.start({}, "")
    return child


def test_nothing_runs_of_a_process_that_cannot_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has no descriptor left: the process counts as not started, so nobody would end it."""
    pids = []

    def fail(pid: int) -> int:
        pids.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(OSError, match="Too many open files"):
        begin(tmp_path, "signal.pause()")
    assert len(pids) == 1 and processes.identify(pids[0]) is None


def end(child: Child) -> None:
    child.life.signal_group(signal.SIGKILL)
    while not child.life.check_end():
        time.sleep(0.01)
    child.close()


@pytest.mark.parametrize(
    ("program", "fails"),
    [
        ("say(event='telemetry', time=1.0); signal.pause()", True),
        ("say(event='telemetry', time=1.0)\nwhile True: pass", False),
        ("signal.pause()", False),
        ("say(event='telemetry', time=1.0, state='finished'); signal.pause()", False),
    ],
    ids=["hangs", "computes", "has not joined", "has left"],
)
def test_a_member_that_neither_answers_nor_computes_hangs(
    program: str, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE", 0.3)
    child, failure = begin(tmp_path, program), None
    deadline = time.monotonic() + (60 if fails else 3)
    while failure is None and time.monotonic() < deadline:
        time.sleep(0.2)
        child.life.events.read()
        failure = child.check_stall()
    end(child)
    assert (failure is not None) == fails
    if failure is not None:
        assert failure.cause == "has neither answered nor used processor time for 1 s"


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("say(event='telemetry', time=1.0)", "ended with status 0 but did not leave the job"),
        ("say(event='telemetry', time=1.0); say(event='finished', time=2.0)", ""),
        ("pass", ""),
    ],
    ids=["vanishes", "leaves", "never joins"],
)
def test_a_member_that_ends_without_leaving_has_failed(program: str, cause: str, tmp_path: Path) -> None:
    child = begin(tmp_path, program)
    while not child.life.check_end():
        time.sleep(0.01)
    child.life.events.read()
    failure = child.failure(memory=False)
    child.close()
    assert (failure.cause if failure is not None else "") == cause
