"""A job after its start: jobs, status, logs, attach. Launch, agents and commands are the real ones; the roles are the
small programs of stand_in.py. tests/jobs/test_stop.py ends jobs, tests/jobs/test_collect.py collects logs.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from desk import GEOMX, Desk, Launch
from sshd import Person, Sshd

from geomx_cli.agent import processes
from geomx_cli.agent.agent_state import AgentState
from geomx_cli.commands.jobs import _print, _shortened
from geomx_cli.core.errors import HostUnreachable, InvalidSettings
from geomx_cli.hosts.interface import Completed
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.jobs.actions import attach as attaching
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.store.registry import KnownJob, find
from geomx_cli.jobs.view.job_view import JobView
from geomx_cli.plan import JobSpec

NAMES = [
    "central/global_scheduler:0", "central/global_server:0", "central/scheduler:0", "central/worker:0",
    "A/scheduler:0", "A/server:0", "A/worker:0", "A/worker:1",
]  # fmt: skip
WAIT = {"*": "wait"}


def detached(desk: Desk, *options: str, **story: str) -> Launch:
    """A detached job that runs until there is a file "go" in its directory."""
    launch = desk.launch("--detach", *options, story={**WAIT, **story})
    assert launch.finish() == 0, launch.errors
    return launch.wait_until_running()


def states(desk: Desk, job: str) -> dict[str, str]:
    """The state of each process."""
    return {process["name"]: process["state"] for process in desk.json("status", job)["processes"]}


def in_jobs(desk: Desk) -> list[tuple[str, str, int | None]]:
    """The state and exit code of each job, newest first."""
    return [(job["job"], job["state"], job["exit_code"]) for job in desk.json("jobs")["jobs"]]


def test_no_jobs(desk: Desk) -> None:
    assert desk.json("jobs") == {"schema_version": 1, "jobs": []}
    done = desk.geomx("jobs", "prune")
    assert (done.returncode, done.stderr) == (0, "no job to remove\n"), "there is nothing to ask"
    done = desk.geomx("status")
    assert (done.returncode, done.stdout) == (3, "")
    assert "there are no jobs in" in done.stderr and "geomx launch" in done.stderr


def test_a_job_in_preparation_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "geomx" / "jobs" / "job-1"
    folder.mkdir(parents=True, mode=0o700)
    job_state.follow(folder)
    for name in ("", "job"):
        with pytest.raises(InvalidSettings, match="still preparing job job-1"):
            find(name)
    with pytest.raises(InvalidSettings, match="no jobs"):
        find("other")


def test_jobs_from_start_to_end(desk: Desk) -> None:
    first, second = desk.launch(story=WAIT), desk.launch("--job-dir", str(desk.folder / "else"), story=WAIT)
    for launch in (first, second):
        launch.wait_until_running()
    known = in_jobs(desk)
    assert sorted(known) == sorted((launch.id, "running", None) for launch in (first, second))
    done = desk.geomx("status")
    assert done.stderr == "" and done.stdout.startswith(f"job {known[0][0]}: running")
    done = desk.geomx("status", first.id[:4])
    assert done.returncode == 3 and "2 jobs begin with" in done.stderr and first.id in done.stderr
    assert f"the newest are {known[0][0]}" in desk.geomx("status", "nix").stderr
    (first.directory / "go").touch()
    assert first.finish() == 0
    os.kill(second.process.pid, signal.SIGKILL)
    second.finish()
    assert {job: (state, code) for job, state, code in in_jobs(desk)} == {
        first.id: ("done", 0), second.id: ("orphaned", None),
    }  # fmt: skip
    assert desk.json("status", str(desk.folder / "else"))["job"] == second.id
    lines = desk.geomx("jobs").stdout.splitlines()
    assert lines[0].split()[:4] == ["JOB", "STARTED", "STATE", "EXIT"] and len(lines) == 3


def test_a_long_script_is_cut_before_its_algorithm() -> None:
    options = {"algo": "diloco", "compress": "int8", "network": "cnn"}
    for script, what in (((), "cnn by diloco, int8"), (("python", "a.py"), "python a.py by diloco, int8")):
        job = KnownJob("j", Path("j"), 0.0)
        job.__dict__["plan"] = SimpleNamespace(spec=JobSpec(options=options, script=script))
        assert job.what == what == _shortened(what)
    assert _shortened(f"python {'x' * 50}.py by diloco, int8") == f"python {'x' * 22}... by diloco, int8"
    assert _shortened(f"python {'x' * 50}.py") == f"python {'x' * 38}..."
    assert _shortened(f"python /home/me/{'x' * 40}/train.py --lr 0.1") == "python .../train.py --lr 0.1"
    codec = "bsc:0.01,fp32,min=1000,pull=union+int8"
    assert _shortened(f"python {'x' * 50}.py by fsa, {codec}") == f"python {'x' * 6}... by fsa, {codec[:20]}..."


def test_a_table_of_jobs_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal; elsewhere each job is one line."""
    job = {
        "job": "20260729-171530-abcdef", "started": 0.0, "state": "done in part", "exit_code": 7, "hosts": ["A"],
        "result": {"accuracy": 0.9},
    }  # fmt: skip
    long = [f"python /home/me/{'x' * 60}/train.py", "cnn by diloco, topk:0.01+int8", "x" * 60]
    known = [{**job, "what": what} for what in long]
    monkeypatch.setenv("COLUMNS", "80")
    _print(known)
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(known)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _print(known)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2::2] == ["  python .../train.py", "  cnn by diloco, topk:0.01+int8", f"  {'x' * 45}..."]


def test_status_tells_what_the_live_view_does(desk: Desk) -> None:
    launch = detached(desk)
    found = desk.json("status", launch.id)
    assert (found["schema_version"], found["state"], found["phase"]) == (1, "detached", "training")
    assert [process["name"] for process in found["processes"]] == NAMES
    assert all(process["pid"] == launch.pid(process["name"]) for process in found["processes"])
    assert [(host["host"], host["agent"], host["problem"]) for host in found["hosts"]] == [
        ("central", "running", ""), ("A", "running", ""),
    ]  # fmt: skip
    (launch.directory / "go").touch()
    launch.wait_for(lambda: desk.json("status")["state"] == "done")
    found = desk.json("status")
    worker = next(process for process in found["processes"] if process["name"] == "A/worker:1")
    assert (worker["state"], worker["status"], worker["round"], worker["accuracy"]) == ("finished", 0, 3, 0.75)
    assert worker["bytes"] == {"lan": [100, 200], "wan": [7, 9]}
    assert (found["totals"]["rounds"], found["totals"]["accuracy"], found["progress"]) == (3, 0.75, 1)
    shown = desk.geomx("status").stdout
    assert "A/worker:1" in shown and "0.7500" in shown and "finished 100%, round 3" in shown
    assert in_jobs(desk) == [(launch.id, "done", 0)]


def test_status_explains_the_first_failure(desk: Desk) -> None:
    launch = detached(desk, **{"*": "misses A/server:0", "A/server:0": "fails"})
    (launch.directory / "go").touch()
    launch.wait_for(lambda: desk.json("status")["state"] not in ("running", "detached"))
    found = desk.json("status")
    assert found["state"] == "failed", found
    assert found["failure"]["process"] == "A/server:0"
    assert found["failure"]["cause"] == "exited with status 1: ValueError: the data set is not there"
    assert "A/server:0 (server 0 of party A, on host A) failed first" in desk.geomx("status").stdout


class Cut(LocalConnector):
    """A host that nobody can reach."""

    def run(self, argv: Sequence[str], *, data: bytes = b"", limit: float) -> Completed:
        raise HostUnreachable(f"{self.name}: no route to host", "")


def test_status_repeats_the_verdict_of_launch_whatever_hosts_answer(desk: Desk) -> None:
    launch = desk.launch(story={"*": "misses A/server:0", "A/server:0": "fails"}).wait_until_running()
    (launch.directory / "go").touch()
    assert launch.finish() == 1
    job, state = KnownJob.at(launch.directory), job_state.JobState.read(launch.directory)
    assert job is not None and state is not None and state.error is not None
    told = "\n  ".join(state.error)
    assert "A/server:0 (server 0 of party A, on host A) failed first" in told
    for lost in ((), ("A",), ("A", "central")):
        hosts = {name: Cut(name) if name in lost else host for name, host in job.open_hosts().items()}
        view = JobView.of(job, hosts)
        assert (view.verdict, view.state, view.progress.phase) == (told, "failed", "stopped")
        assert view.ended and view.to_json()["failure"]["process"] == "A/server:0"
    replace(state, state="detached", result=None).write(launch.directory)  # as if nobody had followed it
    view = JobView.of(job, {name: Cut(name) if name == "A" else host for name, host in job.open_hosts().items()})
    assert view.verdict.startswith("host A cannot be reached: ") and "no route to host" in view.verdict


def test_watch_ends_with_the_job(desk: Desk) -> None:
    launch = detached(desk)
    watching = desk.start("status", "--watch")
    launch.wait_for(lambda: watching.poll() is None)
    (launch.directory / "go").touch()
    output, errors = watching.communicate(timeout=240)
    assert watching.returncode == 0 and ": done; started" in output, errors


def test_status_of_hosts_that_say_nothing_useful(desk: Desk) -> None:
    launch = detached(desk, "--restarts", "0")
    status_file = launch.directory / "hosts" / "A" / "status.json"
    # Status reports a killed agent as failed, a stopped one as silent; neither writes its file again.
    os.kill(launch.pid("agent central"), signal.SIGSTOP)
    os.kill(launch.pid("agent A"), signal.SIGKILL)
    content = json.loads(status_file.read_bytes())
    job = KnownJob.at(launch.directory)
    assert job is not None

    def problem(changed: bytes | dict[str, Any] | None) -> tuple[str, str]:
        if changed is None:
            status_file.unlink()
        else:
            status_file.write_bytes(changed if isinstance(changed, bytes) else json.dumps(changed).encode() + b"\n")
        host = JobView.of(job, job.open_hosts()).to_json()["hosts"][1]
        return host["agent"], host["problem"]

    # the signal takes effect with a delay
    launch.wait_for(lambda: problem({**content, "uptime": content["uptime"] - 60})[0] == "gone")
    assert "no status for" in problem({**content, "uptime": content["uptime"] - 60})[1]
    me = processes.identify(os.getpid())
    silent = problem({**content, "uptime": content["uptime"] - 60, "agent": me})
    assert silent[0] == "silent" and "its agent runs, but has not written its status for" in silent[1]
    assert "failure" not in desk.geomx("status").stdout and desk.json("status")["failure"] is None
    assert problem({**content, "boot": "another"})[0] == "rebooted"
    assert problem({**content, "boot": "another", "machine": "another"})[0] == "elsewhere"
    assert problem(b'{"half": ')[0] == "damaged"
    assert problem({"stage": "running"})[0] == "damaged"
    assert desk.json("status")["hosts"][1]["agent"] == "damaged"
    assert problem({**content, "processes": {"A/worker:0": 3}})[0] == "damaged"
    assert problem({**content, "failures": [{"process": "A/worker:0"}]})[0] == "damaged"
    assert problem({**content, "uptime": 10**400})[0] == "damaged"
    assert problem(b'{"a":' * 100_000)[0] == "damaged"
    assert problem(None)[0] == "not started"


def test_logs(desk: Desk) -> None:
    launch = detached(desk)
    with (launch.directory / "logs" / "A-worker-1.log").open("ab") as log:
        log.write(b"two\n\xff" + b"x" * 200_000 + b"\nno end")
    done = desk.geomx("logs")
    assert done.returncode == 0 and done.stderr == f"job {launch.id}\n"
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(" begins")] == [f"{name} | {name} begins" for name in NAMES]
    assert lines[-1] == "A/worker:1 | no end" and "A/worker:1 | two" in lines
    assert sum(len(line) for line in lines) > 200_000

    def chosen(*arguments: str) -> list[str]:
        return desk.geomx("logs", launch.id, "-n", "1", *arguments).stdout.splitlines()

    assert chosen("--role", "worker", "--rank", "1") == ["A/worker:1 | no end"]
    assert chosen("--role", "global-server") == ["central/global_server:0 | central/global_server:0 begins"]
    assert chosen("--party", "A")[-1] == "A/worker:1 | no end" and len(chosen("--party", "A")) == 4
    done = desk.geomx("logs", "--role", "boss")
    assert done.returncode == 2 and "there is no role 'boss'" in done.stderr


def test_logs_that_are_no_plain_files_or_have_no_lines(desk: Desk) -> None:
    launch = detached(desk)
    logs = launch.directory / "logs"
    (logs / "A-worker-0.log").unlink()
    (logs / "A-worker-0.log").symlink_to("/dev/zero")
    (logs / "A-server-0.log").unlink()
    os.mkfifo(logs / "A-server-0.log")
    (logs / "A-scheduler-0.log").unlink()
    (logs / "A-scheduler-0.log").mkdir()
    with (logs / "A-worker-1.log").open("ab") as log:
        log.truncate(64 << 20)
    for arguments in ((), ("-n", "2")):
        done = desk.geomx("logs", "--party", "A", *arguments)
        assert done.returncode == 7
        for what in ("A-worker-0.log is a link", "A-server-0.log is a pipe", "A-scheduler-0.log is a folder"):
            assert what in done.stderr
    assert "A/worker:1 | A/worker:1 begins" in desk.geomx("logs").stdout


def test_logs_follow_to_the_end_of_the_job_or_ctrl_c(desk: Desk) -> None:
    launch = detached(desk)
    following = desk.start("logs", "-f", "-n", "0", "--role", "worker")
    interrupted = desk.start("logs", "-f")
    launch.wait_for(lambda: readable(interrupted))
    interrupted.send_signal(signal.SIGINT)
    output, errors = interrupted.communicate(timeout=240)
    assert (interrupted.returncode, errors) == (130, f"job {launch.id}\n") and " begins\n" in output
    with (launch.directory / "logs" / "A-worker-0.log").open("a") as log:
        launch.wait_for(lambda: print("line", file=log, flush=True) or readable(following))
        (launch.directory / "go").touch()
        print("the end", file=log, flush=True)
    output, errors = following.communicate(timeout=240)
    assert following.returncode == 0, errors
    lines = output.splitlines()
    assert lines[-1] == "A/worker:0 | the end" and "begins" not in output


INTERRUPTED = """
import os, signal, sys
from geomx_cli import cli
from geomx_cli.jobs.actions import {module}

def interrupted(*given):
    os.kill(os.getpid(), signal.SIGINT)
    return real(*given)

real, {module}.{function} = {module}.{function}, interrupted
sys.exit(cli.main())
"""


def test_ctrl_c_ends_logs_quietly_only_if_they_follow(desk: Desk) -> None:
    launch = desk.launch(story={})
    assert launch.finish() == 0, launch.errors
    desk.command = [sys.executable, "-c", INTERRUPTED.format(module="logs", function="select")]
    done = desk.geomx("logs", "-f")
    assert (done.returncode, done.stderr) == (130, f"job {launch.id}\n")
    done = desk.geomx("logs")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "error: interrupted"), "lines are missing"


def test_logs_go_on_where_they_were_when_a_host_was_lost(desk: Desk) -> None:
    launch = detached(desk)
    following = desk.start("logs", "-f", "-n", "1", "--role", "worker", "--party", "A")
    log = launch.directory / "logs" / "A-worker-0.log"
    launch.wait_for(lambda: readable(following))
    assert following.stderr is not None and launch.id in following.stderr.readline()
    for number in range(3):
        tails = processes.descendants(following.pid)
        with log.open("a") as file:
            print(f"line {number}", file=file)
        processes.send_signal(tails, signal.SIGKILL)
        assert "host A: the connection broke; trying again" in following.stderr.readline()
        assert "host A is connected again" in following.stderr.readline()
    (launch.directory / "go").touch()
    output, errors = following.communicate(timeout=240)
    assert following.returncode == 0, errors
    told = [line for line in output.splitlines() if line.startswith("A/worker:0 | ")]
    assert told[1:] == [f"A/worker:0 | line {number}" for number in range(3)], output


def test_launch_that_slept_gives_its_agents_a_fresh_chance(desk: Desk) -> None:
    launch = desk.launch("--lease", "30s", story=WAIT).wait_until_running()
    for pause in (6.5, 3.5):
        launch.process.send_signal(signal.SIGSTOP)
        time.sleep(pause)
        launch.process.send_signal(signal.SIGCONT)
        time.sleep(0.5)
    (launch.directory / "go").touch()
    assert launch.finish() == 0, launch.errors


def test_a_job_goes_on_while_its_launch_is_suspended(desk: Desk) -> None:
    launch = desk.launch("--lease", "2s", story=WAIT).wait_until_running()
    launch.process.send_signal(signal.SIGTSTP)  # Ctrl-Z
    own = processes.identify(launch.process.pid)
    assert own is not None
    launch.wait_for(lambda: processes.state(own) == "T")
    time.sleep(4)
    assert states(desk, launch.id)["A/worker:0"] == "training"
    launch.process.send_signal(signal.SIGCONT)  # fg
    (launch.directory / "go").touch()
    assert launch.finish() == 0, launch.errors
    assert f"suspended; job {launch.id} keeps running" in launch.errors


def test_a_lease_counts_again_once_a_launch_is_continued(desk: Desk) -> None:
    launch = desk.launch("--lease", "2s", story=WAIT).wait_until_running()
    own = processes.identify(launch.process.pid)
    assert own is not None
    launch.process.send_signal(signal.SIGTSTP)
    launch.wait_for(lambda: processes.state(own) == "T")
    launch.process.send_signal(signal.SIGCONT)
    launch.wait_for(lambda: processes.state(own) != "T")
    time.sleep(1)
    launch.process.kill()
    launch.process.wait()
    launch.wait_for(lambda: not launch.pids())


def readable(process: "subprocess.Popen[str]") -> bool:
    """Whether it has printed anything."""
    return bool(select.select([process.stdout], [], [], 0)[0])


def test_attach_lets_go_and_follows_to_the_end(desk: Desk) -> None:
    launch = detached(desk)
    attached = desk.start("attach")
    launch.wait_for(lambda: in_jobs(desk)[0][1] == "running")
    done = desk.geomx("attach")
    assert done.returncode == 3 and f"followed by process {attached.pid} already" in done.stderr
    attached.send_signal(signal.SIGINT)
    output, errors = attached.communicate(timeout=240)
    assert (attached.returncode, output) == (0, "")
    assert f"detached; job {launch.id} keeps running" in errors
    assert in_jobs(desk) == [(launch.id, "detached", None)] and states(desk, launch.id)["A/worker:0"] == "training"
    attached = desk.start("attach", "--json")
    launch.wait_for(lambda: in_jobs(desk)[0][1] == "running")
    (launch.directory / "go").touch()
    output, errors = attached.communicate(timeout=240)
    assert attached.returncode == 0, errors
    result = json.loads(output)
    assert (result["status"], result["accuracy"], result["rounds"]) == ("done", 0.75, 3)
    assert desk.json("attach") == result
    assert in_jobs(desk) == [(launch.id, "done", 0)] and not launch.pids()


@pytest.mark.parametrize("stopped", [False, True])
def test_ctrl_c_in_attach_after_the_end_of_the_job_does_not_lose_the_end(desk: Desk, stopped: bool) -> None:
    launch = detached(desk)
    desk.command = [sys.executable, "-c", INTERRUPTED.format(module="attach", function="record_conclusion")]
    attached = desk.start("attach", "--json")
    desk.command = GEOMX
    launch.wait_for(lambda: in_jobs(desk)[0][1] == "running")
    if stopped:
        assert desk.geomx("stop").returncode == 0
    else:
        (launch.directory / "go").touch()
    output, errors = attached.communicate(timeout=240)
    ended = "interrupted" if stopped else "done"
    assert (attached.returncode, json.loads(output)["status"]) == (130, ended), errors
    assert ("is done; Ctrl-C came after its end" in errors) != stopped
    assert in_jobs(desk) == [(launch.id, ended, 130 if stopped else 0)]


def test_attach_tells_how_a_job_ended_meanwhile(desk: Desk) -> None:
    launch = detached(desk, **{"*": "misses A/worker:0", "A/worker:0": "fails"})
    (launch.directory / "go").touch()
    launch.wait_for(lambda: not launch.pids())
    for _ in range(2):  # from the hosts, then from the local copy
        done = desk.geomx("attach")
        assert done.returncode == 1
        assert "A/worker:0 (worker 0 of party A, on host A) failed first: it exited with status 1" in done.stderr
    assert in_jobs(desk) == [(launch.id, "failed", 1)]


@pytest.mark.parametrize("ends", ["done", "failed"])
def test_attach_to_agents_that_have_just_ended(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ends: str
) -> None:
    """They end between the reading of their status and the connection: the result is that of `attach` afterwards."""
    story = {} if ends == "done" else {"*": "misses A/worker:0", "A/worker:0": "fails"}
    launch = detached(desk, **story)
    views: list[JobView] = []

    def of(job: KnownJob, hosts: Any) -> JobView:
        views.append(found := JobView.of(job, hosts))
        if len(views) == 1:
            (launch.directory / "go").touch()
            launch.wait_for(lambda: not launch.pids())
        return found

    monkeypatch.setattr(attaching, "JobView", SimpleNamespace(of=of))
    job = KnownJob.at(launch.directory)
    assert job is not None
    end = attaching.attach(job)
    assert [view.over for view in views] == [False, True]
    assert end.result["status"] == ends and (end.error is None) == (ends == "done")
    assert "died" not in capsys.readouterr().err
    done = desk.geomx("attach", "--json")
    assert json.loads(done.stdout) == end.result and done.returncode == (0 if ends == "done" else 1)
    assert in_jobs(desk) == [(launch.id, ends, done.returncode)] and not launch.pids()


def test_attach_to_an_agent_that_was_just_killed(desk: Desk) -> None:
    launch = detached(desk, "--restarts", "0")
    state = AgentState.read(launch.directory / "hosts" / "A")
    assert state is not None
    os.kill(state.agent.pid, signal.SIGKILL)
    done = desk.geomx("attach")
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1, done.stderr
    assert "died" in done.stderr and not launch.pids()


def test_attach_takes_over_from_a_launch_that_was_killed(desk: Desk) -> None:
    desk.forks = False
    launch = desk.launch("--lease", "30s", story=WAIT).wait_until_running()
    os.kill(launch.process.pid, signal.SIGKILL)
    launch.process.wait()
    attached = desk.start("attach")
    launch.wait_for(lambda: in_jobs(desk)[0][1] == "running")
    attached.send_signal(signal.SIGINT)
    _, errors = attached.communicate(timeout=240)
    assert attached.returncode == 130 and f"job {launch.id} was stopped by Ctrl-C" in errors
    assert not launch.pids()
    assert in_jobs(desk) == [(launch.id, "interrupted", 130)]


@pytest.mark.usefixtures("client")
def test_hosts_behind_ssh(desk: Desk, machines: Callable[..., Sshd], person: Person) -> None:
    sites = [machines("alpha"), machines("beta")]
    launch = desk.launch("--detach", story=WAIT, sites=sites)
    assert launch.finish() == 0, launch.errors
    launch.wait_until_running()
    assert states(desk, launch.id) == dict.fromkeys(NAMES, "training")
    lines = desk.geomx("logs").stdout.splitlines()
    assert [line for line in lines if line.endswith(" begins")] == [f"{name} | {name} begins" for name in NAMES]
    sites[1].stop()
    done = desk.geomx("status", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 7 and "host A: " in done.stderr
    assert [host["agent"] for host in found["hosts"]] == ["running", "unreachable"]
    assert [process["state"] for process in found["processes"]][3:5] == ["training", "? unreachable"]
    done = desk.geomx("logs")
    assert done.returncode == 7 and "host A: " in done.stderr and "central/worker:0 begins" in done.stdout
    assert desk.geomx("attach").returncode == 4
    sites[1].start()
    attached = desk.start("attach", "--json")
    launch.wait_for(lambda: in_jobs(desk)[0][1] == "running")
    for site in sites:  # stand-ins count in their own host's directory
        for name in ("go", "done-1", "done-2", "done-3"):
            (Path(site.state_dir) / "jobs" / launch.id / name).touch()
    output, errors = attached.communicate(timeout=240)
    assert (attached.returncode, json.loads(output)["accuracy"]) == (0, 0.75), errors
