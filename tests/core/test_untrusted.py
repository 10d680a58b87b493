"""Input from hosts is validated: terminal text, lines, messages and statuses; and jobs whose hosts do not answer."""

import io
import json
import os
import stat
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from geomx_cli.agent import processes
from geomx_cli.agent.diagnosis import OomWatcher
from geomx_cli.commands.status import status
from geomx_cli.core import events
from geomx_cli.core.agent_protocol import Warned, parse
from geomx_cli.core.errors import CheckFailed, InvalidSettings, TrainingFailed
from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.core.jsonlines import object_lines
from geomx_cli.core.options import defaults
from geomx_cli.core.root_cause import Failure
from geomx_cli.core.untrusted import decode, plain, plain_all
from geomx_cli.hosts.local import LocalConnector
from geomx_cli.jobs.actions.agent_connection import Gone, InboxMessage
from geomx_cli.jobs.actions.agent_pool import AgentPool
from geomx_cli.jobs.actions.attach import attach
from geomx_cli.jobs.actions.launch import host_specs
from geomx_cli.jobs.actions.logs import LogReader, select
from geomx_cli.jobs.actions.stop import stop
from geomx_cli.jobs.actions.watch import Watch
from geomx_cli.jobs.store import JobDirectory, job_state
from geomx_cli.jobs.store.job_state import JobState
from geomx_cli.jobs.store.registry import KnownJob, all_jobs
from geomx_cli.jobs.view.failure_report import explain
from geomx_cli.jobs.view.follow import PlainView
from geomx_cli.jobs.view.job_view import JobView
from geomx_cli.jobs.view.progress import Progress
from geomx_cli.jobs.view.result import Outcome
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.job_spec import complete
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine

NASTY = "\x1b]0;title\x07red \x1b[31;1mtext\x1b[0m\x9b2J\x08\r\u202eend"


@pytest.fixture
def known(tmp_path: Path) -> KnownJob:
    """A job that was planned and stored, but not started."""
    options = defaults()
    spec = complete(JobSpec(options=options, job_dir=str(tmp_path / "job"), socket_dir="/tmp/none", python="python"))
    inventory = this_machine(options, range(20_000, 20_000 + ports_needed(options)))
    (tmp_path / "job").mkdir(mode=0o755)
    JobDirectory(spec.job, tmp_path / "job").write_plan(plan(inventory, spec), inventory)
    job_state.follow(tmp_path / "job")
    known = KnownJob.at(tmp_path / "job")
    assert known is not None
    return known


def follower_is_gone(known: KnownJob) -> KnownJob:
    """The state after SIGKILL to launch."""
    state = JobState.read(known.directory)
    assert state is not None
    replace(state, pid_started=1, started=time.time() - 100).write(known.directory)
    again = KnownJob.at(known.directory)
    assert again is not None
    return again


def write_status(known: KnownJob, host: str, **changes: Any) -> None:
    """Write the final status file of a host's agent."""
    content = {
        "schema_version": 1, "job": known.id, "host": host, "time": time.time(), "uptime": processes.uptime(),
        "boot": processes.boot_id(), "machine": "here", "agent": (1, 0),
        "stage": "over", "why": "", "asked": "", "ordered": False, "left": [], "processes": {}, "failures": [],
        "usage": {},
        **changes,
    }  # fmt: skip
    path = Path(known.directory_on(host), "status.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content) + "\n")


def use_python(known: KnownJob, folder: Path, host: str, answer: str) -> KnownJob:
    """Let `host` answer all commands with this text."""
    (folder / "answer").write_text(answer)
    program = folder / "python.sh"
    program.write_text(f"#!/bin/sh\nexec cat {folder}/answer\n")
    program.chmod(0o755)
    inventory = json.loads((known.directory / "inventory.json").read_bytes())
    for entry in inventory["hosts"]:
        entry["python"] = str(program) if entry["name"] == host else entry["python"]
    (known.directory / "inventory.json").write_text(json.dumps(inventory))
    return replace(known)


def test_text_does_a_terminal_no_harm() -> None:
    assert plain(NASTY) == "red text2Jend"
    assert plain("tab\t, end\n, ümlaut 漢") == "tab\t, end\n, ümlaut 漢"
    assert plain("half \ud83d of a \U0001f600") == "half \ufffd of a \U0001f600"
    out = io.StringIO()
    PlainView(out).note(NASTY)
    assert out.getvalue() == "red text2Jend\n"


def test_a_host_writes_no_line_of_geomx_itself() -> None:
    """Lines after the first are indented, in events and in whatever else a host sends. Nothing fails to be printed."""
    forged = "lost\nerror: all is lost\n  see below\n\x1b[31mwarning: \ud83d"
    safe = "lost\n    error: all is lost\n  see below\n    warning: \ufffd"
    event = events.parse({"event": "warning", "time": 1.0, "message": forged})
    assert isinstance(event, events.WarningRaised) and event.message == safe
    failed = parse({"type": "warning", "message": forged}, "h", {})
    assert isinstance(failed, Warned) and failed.message == safe
    assert plain_all({"a": [forged, safe]}) == {"a": [safe, safe]}


def test_lines_and_json_have_bounds() -> None:
    pieces = iter([b"Welcome\n{one\n{tw", b"o\n", b"{no end", b""])
    assert list(object_lines(lambda: next(pieces), "it")) == [b"{one", b"{two"]
    with pytest.raises(CheckFailed, match="it sent a line of more than 16 MiB"):
        list(object_lines(lambda: b"x" * (1 << 20), "it"))
    for bad in ("{", "[" * 200_000, "[1e400, 2]", '["\x1b[31m"'):
        with pytest.raises(ValueError):
            decode(bad, dict[str, int])


@pytest.mark.parametrize(
    "message",
    [
        {"type": "ended", "process": "A/worker:0"},
        {"type": "ended", "process": "B/worker:0", "status": 1, "asked": False},
        {"type": "event", "process": "A/worker:0", "event": [], "age": 0},
        {"type": "event", "process": "A/worker:0", "event": {}, "age": 10**400},
        {"type": "event", "process": "A/worker:0", "event": {}, "age": float("inf")},
        {"type": "hello", "status": {"processes": {}}},
        {"type": "failure", "failure": {"process": "A/worker:0", "shoe": 41}, "age": 0},
        {"type": "done", "why": None, "asked": "", "left": []},
    ],
)
def test_message_that_makes_no_sense_is_that_host_s_failure(known: KnownJob, message: dict[str, Any]) -> None:
    places = {process.name: process.host for process in known.plan.processes}
    with pytest.raises(ValueError):
        parse(message, places["A/worker:0"], places)
    assert parse({"type": ["event"]}, places["A/worker:0"], places) is None


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["interrupt", "suspend", "gone", "broken", "mended", "notice"])
def test_no_host_can_speak_for_the_control_machine(known: KnownJob, kind: str) -> None:
    places = {process.name: process.host for process in known.plan.processes}
    message = {"type": kind, "how": "died", "why": "x", "message": "x", "reachable": True, "limit": 0.0}
    assert parse(message, "A", places) is None
    assert parse(message, "", places) is None
    said = [(host, {**message}) for host in known.plan.hosts]
    over = [(host, {"type": "done", "why": "", "asked": "", "left": []}) for host in known.plan.hosts]
    outcome = watched(known, said + over)
    assert not outcome.interrupted
    assert outcome.failure is None


@pytest.mark.processes
def test_a_warning_that_comes_late_is_told_with_its_age(known: KnownJob) -> None:
    said, process = io.StringIO(), known.plan.processes[0]
    warning = {"event": "warning", "message": "no heartbeat", "schema_version": 1, "time": time.time()}
    late = [
        (process.host, {"type": "event", "process": process.name, "event": warning, "age": age})
        for age in (0.0, 3601.0)
    ]
    over = [(host, {"type": "done", "why": "", "asked": "", "left": []}) for host in known.plan.hosts]
    watched(known, late + over, said)
    told = [line.removeprefix("warning: ") for line in said.getvalue().splitlines() if "heartbeat" in line]
    usual = f"{process.name}: {warning['message']}"
    assert told == [usual, f"{usual} (1 h 00 min ago)"]


def watched(
    known: KnownJob, messages: Sequence[tuple[str, dict[str, Any] | InboxMessage]], output: io.StringIO | None = None
) -> Outcome:
    """The outcome when agents send these messages."""
    hosts = {name: LocalConnector(name) for name in known.plan.hosts}
    given = host_specs(known.plan, known.inventory, dict.fromkeys(hosts, ""), dict.fromkeys(hosts, 6.0))
    pool = AgentPool(hosts, given)
    for message in messages:
        pool.inbox.put(message)
    try:
        progress = Progress.of(known.plan, time.monotonic())
        return Watch(known.plan, pool, progress, PlainView(output or io.StringIO())).run()
    finally:
        pool.close()


@pytest.mark.processes
def test_watch_blames_the_host_and_says_what_to_do(known: KnownJob) -> None:
    first, *others = known.plan.hosts
    rest: list[tuple[str, dict[str, Any]]]
    rest = [(name, {"type": "done", "why": "", "asked": "", "left": []}) for name in others]
    failure = watched(known, [(first, {"type": "started"}), *rest]).failure
    assert failure is not None and failure.host == first and failure.cause.startswith("sent an invalid message: ")
    gone = Gone("cannot be reached: its connection broke", reachable=False)
    failure = watched(known, [(first, gone), *rest]).failure
    assert failure is not None and "lease" in failure.hint and f"geomx stop {known.plan.job}" in failure.hint


@pytest.mark.processes
def test_job_that_was_never_started(known: KnownJob) -> None:
    begun = JobView.of(known, known.open_hosts())  # launch is still copying files
    assert (begun.state, begun.over) == ("running", False)
    again = follower_is_gone(known)
    job_view = JobView.of(again, again.open_hosts())
    assert (job_view.state, job_view.over) == ("failed", True)
    for _ in range(2):
        end = attach(replace(again))
        assert isinstance(end.error, TrainingFailed) and "was never started" in str(end.error)
    state = JobState.read(known.directory)
    assert state is not None and state.result is not None
    assert (state.state, state.result["exit_code"]) == ("failed", 1)


@pytest.mark.processes
def test_a_host_of_a_job_that_is_about_to_start_has_no_status_yet(known: KnownJob) -> None:
    def shown() -> str:
        return CliRunner().invoke(status, [str(known.directory)]).output

    assert "running; started" in shown() and "no agent status" not in shown()
    write_status(known, "A", stage="running")
    assert "host B: no agent status was found there" in shown()


@pytest.mark.processes
def test_stop_of_a_job_that_was_never_started(known: KnownJob) -> None:
    assert stop(follower_is_gone(known), grace=0.1).error() is None
    state = JobState.read(known.directory)
    assert state is not None and state.state == "failed"


@pytest.mark.processes
def test_clock_of_a_host_that_is_wrong_does_not_count(known: KnownJob) -> None:
    again = follower_is_gone(known)
    for host in known.plan.hosts:
        write_status(known, host, time=time.time() + 3600)
    end = JobView.of(again, again.open_hosts()).conclusion()
    assert end.error is None and 99 < end.result["total_s"] < 1000


@pytest.mark.processes
def test_host_speaks_for_its_own_processes_only(known: KnownJob) -> None:
    process = {"pid": 1, "state": "ended", "status": 1, "ended": None, "asked": False, "newest": {}}
    event = {"event": "telemetry", "time": 1, "left_s": float("inf"), "round": float("inf"), "bytes": 3}
    names = [one.name for one in known.plan.processes]
    failures = [
        Failure(name, "x", f"was {NASTY}", 1, tail=[NASTY]).to_message()
        for name in names
    ]
    first, *others = known.plan.hosts
    told = {name: {**process, "newest": {"telemetry": event, "x": {"time": []}}} for name in names}
    write_status(known, first, processes={**told, "nobody": process}, failures=failures)
    for host in others:
        write_status(known, host)
    again = follower_is_gone(known)
    job_view = JobView.of(again, again.open_hosts())
    ended = {row.process.host for row in job_view.progress.rows.values() if row.status is not None}
    assert ended == {first} and job_view.failure is not None and job_view.failure.host == first
    text = explain(job_view.failure, known.plan).message
    assert "red text2Jend" in text and not any(code in text for code in "\x1b\x07\x08\r\x9b")
    json.dumps(job_view.to_json())


STRANGE = ["", "{", "[]", "Welcome\n{}\n", '{"process": 3}\n', '{"process": "x", "line": ""}\n']


@pytest.mark.processes
@pytest.mark.parametrize("answer", STRANGE)
def test_answers_that_make_no_sense(known: KnownJob, tmp_path: Path, answer: str) -> None:
    host = known.plan.hosts[0]
    strange = use_python(follower_is_gone(known), tmp_path, host, answer)
    reader = LogReader(strange, [process for process in select(strange.plan) if process.host == host])
    try:
        assert list(reader.read()) == [] and reader.problems[host]
    finally:
        reader.close()
    report = stop(strange, grace=0.1)
    assert [one.problem != "" for one in report.hosts] == [name == host for name in strange.plan.hosts]


@pytest.mark.processes
def test_lines_of_logs_are_plain(known: KnownJob, tmp_path: Path) -> None:
    process = known.plan.processes[0]
    messages = ({"usage": {"cpu": "all"}}, {"process": process.name, "line": NASTY}, {"end": True})
    answer = "\n".join(["Welcome", *map(json.dumps, messages), ""])
    reader = LogReader(use_python(known, tmp_path, process.host, answer), [process])
    try:
        assert [line.text for line in reader.follow()] == ["red text2Jend"] and reader.problems == {}
    finally:
        reader.close()


def test_only_who_follows_a_job_lets_go_of_it(known: KnownJob) -> None:
    job_state.detach(known.directory)
    state = JobState.read(known.directory)
    assert state is not None and state.state == "detached"
    parent = processes.identify(os.getppid())
    assert parent is not None
    newer = replace(state, state="running", pid=parent.pid, pid_started=parent.started)
    newer.write(known.directory)
    job_state.detach(known.directory)
    assert JobState.read(known.directory) == newer


def test_files_with_secrets_are_private_and_links_stay(known: KnownJob) -> None:
    for name in ("plan.json", "inventory.json"):
        assert stat.S_IMODE((known.directory / name).stat().st_mode) == 0o600
    link = jobs_folder() / known.plan.job
    assert link.is_symlink()
    known.directory.rename(known.directory.with_name("away"))  # like an unmounted disk
    assert known.plan.job not in [job.id for job in all_jobs()]
    known.directory.with_name("away").rename(known.directory)
    assert known.plan.job in [job.id for job in all_jobs()]


@pytest.mark.parametrize(
    "change",
    [
        {"job_dirs": 7}, {"job_dirs": {}}, {"job": 7}, {"here": 3}, {"options": []}, {"processes": []}, {"links": [3]},
        {"processes": [{"name": "A/worker:0"}]}, {"script": None}, {"topology": "star"},
    ],
)  # fmt: skip
def test_damaged_plan_is_named_with_what_to_do(known: KnownJob, change: dict[str, Any]) -> None:
    path = known.directory / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **change}))
    with pytest.raises(InvalidSettings, match=r"plan\.json is damaged") as error:
        assert KnownJob(known.id, known.directory, 0.0).plan
    assert "restore the file" in error.value.hint
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidSettings, match=r"plan\.json cannot be read"):
        assert KnownJob(known.id, known.directory, 0.0).plan


def test_only_a_new_want_of_memory_counts(tmp_path: Path) -> None:
    counts = tmp_path / "vmstat"
    counts.write_text("nr_free 1\noom_kill 7\n")
    memory = OomWatcher(counts)
    assert not memory.ran_out()
    counts.write_text("oom_kill 8\n")
    assert memory.ran_out() and memory.ran_out()
    memory = OomWatcher(counts)
    assert not memory.ran_out()
