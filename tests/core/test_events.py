"""The event log: it reads back what was written, and a full disk ends the log, not the job."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster import ROOT, Cluster
from rounds import assert_equal, expected, run

from geomx_cli.agent.event_tail import EventTail
from geomx_cli.core import event_log
from geomx_cli.core.conventions import life_of
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.events import (
    SCHEMA_VERSION,
    Evaluated,
    ProcessFailed,
    ProcessFinished,
    ProcessRestarted,
    Reported,
    RosterComplete,
    RoundCompleted,
    StateChanged,
    Telemetry,
    Traffic,
    WarningRaised,
    parse,
)
from geomx_cli.core.jsonlines import read_objects

FULL = Path("/dev/full")


def test_events_are_read_as_they_were_written_and_a_line_under_way_is_left(tmp_path: Path) -> None:
    path = tmp_path / "events" / "worker.jsonl"
    log = EventLog(path, party="A", role="worker", rank=1)
    log.write(StateChanged(state="waiting"))
    log.write(RoundCompleted(num_iters=1, total_time=2.0, loss=float("nan"), recorded={"own": 0.5}))
    with path.open("ab") as file:
        file.write(b'no event\n"neither"\n{"event": "finished"')
    found = list(read_objects(path))
    assert [event["event"] for event, _ in found] == ["state", "round"]
    assert all((event["party"], event["role"], event["rank"]) == ("A", "worker", 1) for event, _ in found)
    assert list(read_objects(path, found[0][1])) == found[1:]
    log.close()
    log.write(StateChanged(state="dropped"))


def test_numbers_of_another_life_are_higher(tmp_path: Path) -> None:
    for incarnation in (0, 2):
        log = EventLog(tmp_path / "log", incarnation=incarnation)
        for _ in range(2):
            log.write(StateChanged(state="serving"))
        log.close()
    numbers = [event["number"] for event, _ in read_objects(tmp_path / "log")]
    assert numbers == [1, 2, (2 << 36) + 1, (2 << 36) + 2] and [*map(life_of, numbers)] == [0, 0, 2, 2]


def test_what_is_parsed_is_what_was_written(tmp_path: Path) -> None:
    written = [
        StateChanged(state="waiting", message="for B"),
        Telemetry(state="training", round=3, loss=float("inf"), bytes=Traffic((1, 2), (3, 4), {"B/server:0": (3, 4)})),
        RoundCompleted(num_iters=3, total_time=1.5, times={"0": {"own phase": 0.25}}, recorded={"epsilon": 0.5}),
        Evaluated(round=3, accuracy=0.5), WarningRaised(message="x", reason="y"), RosterComplete(members=[{"rank": 1}]),
        Reported(step=1, total_time=0.5, loss=float("inf"), metrics={"a/b-c": 1.0}, live=True),
        ProcessFailed(message="x", hint="y", peer="z"), ProcessFinished(rounds=3, accuracy=1.0, stopped="time"),
        ProcessRestarted(incarnation=2, message="was killed by SIGKILL; started again"),
    ]  # fmt: skip
    log = EventLog(tmp_path / "log")
    for event in written:
        log.write(event)
    found = [parse(fields) for fields, _ in read_objects(tmp_path / "log")]
    events = [event for event in found if event is not None]
    assert all(event.time > 1e9 for event in events) and [event.number for event in events] == list(range(1, 11))
    assert [msgspec.structs.replace(event, time=0.0, number=0) for event in events] == written


@pytest.mark.parametrize(
    "fields",
    [
        {"event": "state", "state": "x"}, {"event": "state", "time": 1}, {"event": "state", "time": 1, "state": ["x"]},
        {"event": "state", "time": float("nan"), "state": "x"}, {"event": "state", "time": 1e300, "state": "x"},
        {"event": "telemetry", "time": 1, "round": float("inf")}, {"event": "telemetry", "time": 1, "bytes": 3},
        {"event": "telemetry", "time": 1, "bytes": {"wan": [1, 10**400]}}, {"event": "telemetry", "time": True},
        {"event": "telemetry", "time": 1, "progress": 1.5}, {"event": "telemetry", "time": 1, "round": -1},
        {"event": "round", "time": 1, "num_iters": 1, "total_time": 1, "recorded": {"own": "text"}},
        {"event": "round", "time": 1, "num_iters": 1, "total_time": 1, "times": {"first": {}}},
        {"event": "evaluation", "time": 1, "round": 1, "accuracy": float("nan")},
        {"event": "reported", "time": 1, "step": 1, "total_time": 1, "metrics": {"a b": 1.0}},
        {"event": "reported", "time": 1, "step": 1, "total_time": 1, "metrics": {f"m{n}": 1.0 for n in range(65)}},
    ],
    ids=str,
)  # fmt: skip
def test_events_of_wrong_types_or_out_of_bounds_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        parse(fields)


def test_events_of_a_later_version_are_passed_over() -> None:
    state = {"event": "state", "time": 1, "state": "training"}
    assert parse({**state, "colour": {"of": "later"}}) == StateChanged(time=1, state="training"), "a new field"
    assert parse({**state, "event": "quorum"}) is None, "a new kind"
    assert parse({**state, "schema_version": SCHEMA_VERSION + 1, "state": 7}) is None, "another meaning"
    for odd in ({}, {**state, "schema_version": "2"}, {"event": []}, {"event": {}}, {"event": None}):
        assert parse(odd) is None


@pytest.mark.processes
def test_the_agent_starts_without_what_decodes_events() -> None:
    code = (
        "import importlib, pkgutil, sys, geomx_cli.agent as agent;"
        "[importlib.import_module('geomx_cli.agent.' + one.name) for one in pkgutil.iter_modules(agent.__path__)"
        " if one.name != '__main__'];"
        "print(*{'msgspec', 'numpy', 'click', 'zmq'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_a_full_disk_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(FULL)
    for number in range(3):
        log.write(WarningRaised(message=f"this is number {number}"))
    log.close()
    assert capsys.readouterr().err == "events wait until /dev/full can be written: No space left on device\n"


def test_events_of_a_full_disk_are_written_later_and_half_a_line_spoils_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log, write, room = EventLog(tmp_path / "one.jsonl", role="worker"), os.write, 250

    def full(file: int, line: bytes) -> int:
        nonlocal room
        room -= (written := min(len(line), room))
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, line[:written])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        for number in range(5):
            log.write(WarningRaised(message=f"this is number {number}"))
            log.write(Telemetry(round=number))
        torn = (tmp_path / "one.jsonl").read_bytes()
        assert len(torn) == 250 and not torn.endswith(b"\n")
    log.write(ProcessFinished(accuracy=0.5))
    log.close()
    found = [fields for fields, _ in read_objects(tmp_path / "one.jsonl")]
    messages = [fields["message"] for fields in found if fields["event"] == "warning"]
    assert messages[:5] == [f"this is number {number}" for number in range(5)]
    assert found[-2]["accuracy"] == 0.5 and "could not be written for" in messages[5]
    assert "(No space left on device); 5 events are missing" in messages[5]
    assert capsys.readouterr().err.count("events wait until") == 1


@pytest.mark.processes
def test_nothing_is_raised_when_that_cannot_be_told_either() -> None:
    script = """if True:
        import sys
        from pathlib import Path
        from geomx_cli.core.event_log import EventLog
        from geomx_cli.core.events import WarningRaised
        log = EventLog(Path("/dev/full"), talk=sys.stderr)
        for _ in range(3):
            log.write(WarningRaised(message="nobody hears it"))
        print("went on")
    """
    with FULL.open("wb") as stderr:  # for which Python itself may exit with status 120
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, check=False)
    assert done.stdout == b"went on\n"


def test_the_last_events_of_a_worker_reach_its_agent_through_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(event_log, "_LAST", 0.1)
    log = EventLog(FULL, role="worker")
    log.write(Telemetry(round=3))
    log.write(ProcessFinished(accuracy=0.5))
    (event,) = EventTail(FULL).unwritten(capsys.readouterr().err.splitlines())
    assert (event["event"], event["accuracy"]) == ("finished", 0.5)


def test_a_failure_reaches_its_agent_where_the_disk_has_no_room_for_the_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    EventLog(FULL).write(ProcessFailed(message="no room", peer="B/worker:0", observer="B/worker:0"))
    tail = EventTail(FULL)
    tail.unwritten(["x", *capsys.readouterr().err.splitlines(), "warning: y"])
    assert tail.failure is not None and (tail.failure["peer"], tail.failure["message"]) == ("B/worker:0", "no room")


def test_what_cannot_be_logged_is_still_said(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(FULL, talk=sys.stderr)
    log.write(WarningRaised(message="listen"))
    log.close()
    assert capsys.readouterr().err.endswith("warning: listen\n")


def test_a_job_goes_on_when_the_disk_of_its_logs_is_full(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    names = ("gs", "root0", "As", "Asrv0")
    for name in names:
        (tmp_path / "events" / f"{name}.jsonl").symlink_to(FULL)
        cluster.each[name] = {"GEOMX_PROCESS": name, "GEOMX_JOB_DIR": str(tmp_path), "GEOMX_HEARTBEAT": "0.1"}
    assert_equal(run(cluster, tmp_path, {}), expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))
    for name in names:
        assert cluster.output(name).count("events wait until") == 1
