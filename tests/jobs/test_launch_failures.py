"""Launch's messages and clean-up when processes, agents or launch itself are killed or stopped.

Plan, launch and agents are the real ones; the roles are the small programs of stand_in.py.
"""

import contextlib
import json
import os
import pty
import resource
import select
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from desk import GEOMX, MARK, Desk, Launch

from geomx_cli.core.options import defaults
from geomx_cli.core.root_cause import Ending, Failure, first_cause
from geomx_cli.jobs.view.failure_report import explain
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.this_machine import this_machine

pytestmark = pytest.mark.processes

FOREVER = {"*": "forever"}
Start = Callable[[dict[str, str]], Launch]


@pytest.fixture
def start(desk: Desk) -> Start:
    """Starts a launch of stand-ins with this story."""
    return lambda story: desk.launch("--json", "--silence", "5s", story=story)


def result(launch: Launch, status: int) -> dict[str, Any]:
    """The object on stdout of a launch that ends with this exit status."""
    assert launch.finish() == status, launch.errors
    return json.loads(launch.output)  # type: ignore[no-any-return]


def test_success_prints_one_object_and_leaves_only_logs(desk: Desk, start: Start) -> None:
    desk.forks = False
    launch = start({})
    found = result(launch, 0)
    assert (found["status"], found["accuracy"], found["rounds"]) == ("done", 0.75, 3)
    # Three workers (one of them the master, which does not count for the rate) report these bytes each.
    assert found["bytes"] == {"lan": [300, 600], "wan": [21, 27], "encoded": [0, 0], "encoded_lan": [0, 0]}
    assert found["samples_per_s"] == pytest.approx(2 * (64 + 64 + 24) / 1.5)
    assert 0 < found["first_step_s"] < found["total_s"]
    logs = {path.name for path in Path(found["logs"]).iterdir()}
    assert {"A-worker-0.log", "central-global_server-0.log"} < logs
    launch.assert_clean()


def test_a_second_job_in_the_same_directory_is_refused(desk: Desk) -> None:
    first = desk.launch("--job-dir", "job", "--tee", story={})
    assert first.finish() == 0 and "A/worker:0 | A/worker:0 begins\n" in first.errors
    assert "A/worker:1 |" not in first.errors
    second = desk.launch("--job-dir", "job", story={})
    assert second.finish() == 3
    assert "has a job already" in second.errors


def test_terminal_sees_a_table(desk: Desk) -> None:
    ours, theirs = pty.openpty()
    environment = {**desk.environment, "TERM": "xterm", "COLUMNS": "160"}
    command = [*desk.command, "launch", "--tee", "--hosts", str(desk.inventory("job", {}))]
    out = subprocess.DEVNULL
    done = subprocess.run(command, stdout=out, stderr=theirs, env=environment, timeout=240, check=False)
    os.close(theirs)
    text = b""
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:
        while part := terminal.read(1 << 16):
            text += part
    assert done.returncode == 0, text
    assert b"A/worker:0 | A/worker:0 begins\r" in text
    last = text.decode().rsplit("WAN up/down", maxsplit=1)[-1]
    row = next(line for line in last.splitlines() if line.startswith("A/worker:1"))
    assert row.split()[1:3] == ["finished", "3"]
    assert row.split()[-2:] == ["100B/200B", "7B/9B"]
    assert "finished 100%, round 3" in last


def test_script_that_raises_shows_the_exception_and_the_log(desk: Desk, start: Start) -> None:
    desk.forks = False
    launch = start({**FOREVER, "A/worker:1": "raise"})
    failure = result(launch, 1)["failure"]
    assert failure["process"] == "A/worker:1"
    assert failure["cause"] == "exited with status 1: ValueError: the data set is not there"
    assert failure["tail"][0] == "A/worker:1 begins" and len(failure["tail"]) <= 15
    assert "Traceback" in launch.errors and "A-worker-1.log" in launch.errors
    launch.assert_clean()


def test_silent_process_that_others_blame_is_the_cause(start: Start) -> None:
    story = {**FOREVER, "A/worker:0": "blame A/server:0", "A/server:0": "blame central/global_server:0"}
    launch = start(story)
    failure = result(launch, 1)["failure"]
    assert (failure["process"], failure["host"]) == ("central/global_server:0", "central")
    assert "was declared lost by A/server:0" in launch.errors
    launch.assert_clean()


def test_killed_agent_is_named_and_its_processes_are_ended(desk: Desk) -> None:
    launch = desk.launch("--json", "--restarts", "0", story={**FOREVER, "A/worker:0": "family"})
    launch.wait_until_running()
    os.kill(launch.pid("agent A"), signal.SIGKILL)
    assert launch.finish() == 1
    assert "the agent on host A died" in launch.errors
    launch.assert_clean()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_terminated_agent_ends_the_job(start: Start, number: signal.Signals) -> None:
    launch = start(FOREVER)
    launch.wait_until_running()
    os.kill(launch.pid("agent A"), number)
    assert result(launch, 130)["status"] == "interrupted"
    assert f"was stopped by {number.name} to the agent on host A" in launch.errors
    launch.assert_clean()


def test_interrupt_stops_everything(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "deaf"})
    launch.wait_until_running()
    launch.process.send_signal(signal.SIGINT)
    assert result(launch, 130)["status"] == "interrupted"
    launch.assert_clean()


def test_interrupt_when_nothing_can_be_written_any_more(start: Start) -> None:
    launch = start(FOREVER)
    launch.wait_until_running()
    resource.prlimit(launch.process.pid, resource.RLIMIT_FSIZE, (0, 0))  # has the effect of a full disk on launch
    launch.process.send_signal(signal.SIGINT)
    assert result(launch, 130)["status"] == "interrupted"
    assert "warning" in launch.errors and "state.json cannot be written" in launch.errors
    launch.assert_clean()


def test_second_interrupt_kills_at_once(start: Start) -> None:
    launch = start({"*": "deaf"})
    launch.wait_until_running()
    launch.process.send_signal(signal.SIGINT)
    logs = launch.desk.state_files("agent.log", launch.id)
    assert len(logs) == 2
    launch.wait_for(lambda: all("asked to stop" in log.read_text() for log in logs))
    launch.process.send_signal(signal.SIGINT)
    assert launch.finish() == 130
    launch.assert_clean()


LATE = """
import os, signal, sys
from geomx_cli import cli
from geomx_cli.jobs.actions import launch

def conclude(*given):
    os.kill(os.getpid(), signal.SIGINT)  # as the user's, after the last process has ended
    return real(*given)

real, launch.record_conclusion = launch.record_conclusion, conclude
sys.exit(cli.main())
"""


@pytest.mark.parametrize("stopped", [False, True])
def test_an_interrupt_after_the_end_does_not_lose_the_end(desk: Desk, stopped: bool) -> None:
    desk.command = [sys.executable, "-c", LATE]
    launch = desk.launch("--json", story=FOREVER if stopped else {})
    if stopped:
        launch.wait_until_running()
        launch.process.send_signal(signal.SIGINT)
    ended = "interrupted" if stopped else "done"
    assert result(launch, 130)["status"] == ended
    assert ("is done; Ctrl-C came after its end" in launch.errors) != stopped
    desk.command = GEOMX
    (listed,) = desk.json("jobs")["jobs"]
    assert listed["state"] == ended
    launch.assert_clean()


def test_a_closed_terminal_stops_the_job_as_ctrl_c_does(desk: Desk) -> None:
    """Although neither the answer to the signal nor the table nor the result can be written."""
    mark, (ours, theirs) = uuid.uuid4().hex, pty.openpty()
    command = [*desk.command, "launch", "--hosts", str(desk.inventory(mark, FOREVER))]
    environment = {**desk.environment, "TERM": "xterm", MARK: mark}
    with _on_hangup(signal.SIG_DFL):
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, text=True)
    desk.launches.append(launch := Launch(desk, process, mark))
    os.close(theirs)
    with _read(ours):
        launch.wait_until_running()
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(240) == 130
    (job,) = desk.json("jobs")["jobs"]
    assert (job["state"], job["exit_code"]) == ("interrupted", 130)
    launch.assert_clean()


@contextlib.contextmanager
def _on_hangup(handler: signal.Handlers) -> Iterator[None]:
    """Within, how processes that are started take SIGHUP, however these tests were started."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def _read(terminal: int) -> Iterator[None]:
    """Within, read what is written to it, so that the writer does not block."""
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            if select.select([terminal], [], [], 0.1)[0]:
                os.read(terminal, 1 << 16)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_launch_under_nohup_outlives_its_terminal(desk: Desk) -> None:
    with _on_hangup(signal.SIG_IGN):
        launch = desk.launch(story={"*": "wait"})
    launch.wait_until_running()
    launch.process.send_signal(signal.SIGHUP)
    (launch.directory / "go").touch()
    assert launch.finish() == 0, launch.errors


def test_a_job_outlives_the_reader_of_its_messages(desk: Desk) -> None:
    """As of `geomx launch 2>&1 | head`."""
    launch = desk.launch("--json", story={"*": "wait"})
    launch.wait_until_running()
    assert launch.process.stderr is not None and launch.process.stdout is not None
    launch.process.stderr.close()
    (launch.directory / "go").touch()
    assert json.loads(launch.process.stdout.read())["status"] == "done"
    assert launch.process.wait(240) == 0


def test_killed_launch_leaves_nothing(desk: Desk, start: Start) -> None:
    desk.forks = False
    launch = start({**FOREVER, "A/worker:0": "family", "A/server:0": "deaf"})
    launch.wait_until_running()
    launch.process.kill()
    launch.wait_for(lambda: not launch.pids())
    launch.assert_clean()


def test_stopped_launch_ends_the_job(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "family"})
    launch.wait_until_running()
    launch.process.send_signal(signal.SIGSTOP)
    launch.wait_for(lambda: launch.pids() == [launch.process.pid])
    launch.process.send_signal(signal.SIGCONT)
    assert launch.finish() == 1 and "the control machine has been silent" in launch.errors, launch.errors
    launch.assert_clean()


def test_stopped_agent_is_named(start: Start) -> None:
    launch = start({**FOREVER, "A/worker:0": "family"})
    launch.wait_until_running()
    os.kill(launch.pid("agent A"), signal.SIGSTOP)
    assert launch.finish() == 1 and "the agent on host A hangs" in launch.errors, launch.errors
    launch.assert_clean()


HOSTS = {"A/worker:0": "A", "A/server:0": "A", "B/worker:0": "B"}


CUT = Failure("", "A", "cannot be reached", 9, fault="host")
TARDY = Failure("", "A", "did not stop within 13 s", 10, fault="agent")


def _failure(process: str, when: float, peer: str = "", message: str = "", **fields: Any) -> Failure:
    host = HOSTS.get(process, "A")
    return Failure(process, host, "exited with status 1", when, peer=peer, message=message, **fields)


def _missed(process: str, peer: str) -> Failure:
    return _failure(process, 1, peer, f"{peer} has been silent for 6 s", missed="silent", seconds=6.0)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([_failure("A/worker:0", 2), _failure("A/server:0", 1)], "A/server:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("A/server:0", 2)], "A/server:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("B/worker:0", 2)], "B/worker:0"),
        ([_failure("A/worker:0", 1, "A/server:0")], "A/server:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("A/server:0", 2, "B/worker:0")], "B/worker:0"),
        ([_failure("A/worker:0", 1, "A/server:0"), _failure("A/server:0", 2, "A/worker:0")], "A/worker:0"),
        ([_failure("A/worker:0", 1, "somebody")], "A/worker:0"),
        ([_failure("", 3), _failure("A/worker:0", 1, "A/server:0")], ""),
        ([CUT, _failure("B/worker:0", 1, "A/server:0")], ""),
        ([CUT, _failure("A/worker:0", 1, "B/worker:0")], "B/worker:0"),
        ([CUT, _failure("B/worker:0", 10)], "B/worker:0"),
        ([CUT], ""),
        ([TARDY, _failure("B/worker:0", 1)], "B/worker:0"),
        ([TARDY, _failure("A/worker:0", 1, "B/worker:0")], "B/worker:0"),
    ],
)
def test_first_cause(failures: list[Failure], expected: str) -> None:
    found = first_cause(failures, HOSTS)
    assert found is not None
    assert found.process == expected


def test_an_agent_that_stops_late_is_not_what_stopped_the_job() -> None:
    lost = Failure("", "B", "cannot be reached", 9, fault="host")
    for failures in ([lost, TARDY], [TARDY, lost]):
        found = first_cause(failures, HOSTS)
        assert found is not None and (found.host, found.fault) == ("B", "host")
    found = first_cause([TARDY], HOSTS)
    assert found is not None and found.host == "A"


def test_a_lost_host_that_has_only_workers_of_a_group_is_named() -> None:
    """`--reduce torch`: the leader does not learn which of its party's workers has ended, nor they of another."""
    hosts = {"A/worker:0": "A", "A/worker:1": "A", "A/worker:2": "C", "B/worker:0": "B"}
    told = "another worker of party A has ended"
    blames = [_failure("A/worker:0", 2, "A/worker", told), _failure("A/worker:1", 1, "A/worker:0")]
    lost = Failure("", "C", "cannot be reached", 9, fault="host")
    for failures, expected in (
        ([*blames, lost], ("", "C")), ([*blames, CUT], ("", "A")), (blames, ("A/worker:0", "A")),
        ([*blames, Failure("", "B", "cannot be reached", 9, fault="host")], ("A/worker:0", "A")),
        ([*blames, lost, _failure("A/worker:2", 3)], ("A/worker:2", "A")),
    ):  # fmt: skip
        found = first_cause(failures, hosts)
        assert found is not None and (found.process, found.host) == expected


@pytest.mark.parametrize(("tail", "hint"), [([], "its log is empty"), (["no --data"], "correct what the log shows")])
@pytest.mark.parametrize(("how", "ending"), [("exited with status 3", "exited"), ("failed", "reported")])
def test_the_hint_is_where_the_reason_may_be(how: str, ending: Ending, tail: list[str], hint: str) -> None:
    spec = JobSpec(job="j1", job_dir="/jobs/j1", socket_dir="/s", key_dir="/k", python="/py")
    planned = plan(this_machine(defaults(), range(5000, 5012)), spec)
    assert explain(Failure("A/worker:0", "A", how, 1, tail=tail, ending=ending), planned).hint.startswith(hint)


def test_one_exception_of_many_processes_is_one_failure() -> None:
    found = first_cause([_failure("B/worker:0", 2), _failure("A/worker:0", 1), _failure("A/server:0", 3, "x")], HOSTS)
    assert found is not None and (found.process, found.also) == ("A/worker:0", ["B/worker:0"])


def test_what_a_process_could_only_tell_another_one_is_its_own_account() -> None:
    words = "the script raised OSError: [Errno 28] No space left on device; the disk of /jobs is full"
    found = first_cause([_failure("A/server:0", 1, "B/worker:0", words, observer="B/worker:0")], HOSTS)
    assert found is not None
    assert (found.process, found.cause) == ("B/worker:0", f"reported to A/server:0: {words}")
    found = first_cause([_failure("A/server:0", 1, "B/worker:0", words, observer="A/worker:0")], HOSTS)
    assert found is not None and found.cause.startswith("was declared lost by A/server:0, which exited with status 1")


def test_a_full_disk_is_that_of_the_process_that_others_blame() -> None:
    """The one that met it ends last, as it waits for its framework, and could write neither log nor event."""
    disk, full = "/jobs (/dev/sdb1)", "; the disk at /jobs (/dev/sdb1) of host A is full"
    told = "the script raised OSError: [Errno 28] No space left on device"
    failures = [_failure("A/server:0", 1, disk=disk), _failure("A/worker:0", 9, disk=disk)]
    blame = _failure("B/worker:0", 1, "A/worker:0", told, observer="A/worker:0")
    found = first_cause([*failures, blame], HOSTS)
    assert found is not None and found.process == "A/worker:0"
    assert found.cause == f"reported to B/worker:0: {told}{full}"
    found = first_cause(failures, HOSTS)
    assert found is not None and (found.process, found.cause) == ("A/server:0", f"exited with status 1{full}")


@pytest.mark.parametrize(
    ("blamer", "observer", "fault"),
    [("B/worker:0", "B/worker:0", "link"), ("A/worker:0", "B/worker:0", "link"), ("B/worker:0", "A/worker:0", "")],
)
def test_a_process_that_a_firewall_cuts_off_has_not_died(blamer: str, observer: str, fault: str) -> None:
    """The process that lost it counts, whichever reports that first."""
    told = "A/server:0 has been gone for 10 s"
    blame = _failure(blamer, 1, "A/server:0", told, observer=observer, missed="gone", seconds=10.0)
    found = first_cause([blame], HOSTS)
    assert found is not None and (found.process, found.fault) == ("A/server:0", fault)
    cut = "was cut off from B/worker:0 on host B for 10 s, though it ran: a firewall or NAT between hosts A and B"
    assert found.cause.startswith(cut) == bool(fault), found.cause


@pytest.mark.parametrize(
    ("failures", "fault"),
    [
        ([_missed("B/worker:0", "A/server:0")], "link"),
        ([_missed("B/worker:0", "A/server:0"), _missed("A/server:0", "B/worker:0")], "link"),
        ([_missed("B/worker:0", "A/server:0"), _missed("A/worker:0", "A/server:0")], ""),
        ([_missed("A/worker:0", "A/server:0")], ""),
        ([_failure("B/worker:0", 1, "A/server:0")], ""),
        ([CUT, _missed("B/worker:0", "A/server:0")], "host"),
    ],
)
def test_the_link_is_blamed_where_only_another_host_misses_a_process(failures: list[Failure], fault: str) -> None:
    found = first_cause(failures, HOSTS)
    assert found is not None and found.fault == fault
    if fault == "link":
        assert "the link between hosts" in found.cause and "geomx doctor" in found.hint


REFUSING = """
import argparse

import mxnet as mx

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.parse_args()
kv = mx.kv.create("dist_sync")
"""


def test_a_script_that_refuses_its_arguments_says_so_last(desk: Desk) -> None:
    """Not what the interpreter thinks of modules that are imported while it ends."""
    (desk.folder / "train.py").write_text(REFUSING)
    words = ["--local", "--workers", "1", "--json", "--", "python", "train.py", "--epoch", "x"]
    done = desk.geomx("launch", *words)
    failure = json.loads(done.stdout)["failure"]
    assert done.returncode == 1 and failure["cause"] == "exited with status 2", failure
    assert failure["tail"][-1] == "train.py: error: argument --epochs: invalid int value: 'x'", failure["tail"]
    assert "Traceback" not in done.stderr
