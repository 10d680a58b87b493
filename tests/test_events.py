"""The event log: what is read is what was written, and a full disk ends the log, not the job."""

import subprocess
import sys
from pathlib import Path

import pytest
from cluster import ROOT, Cluster
from test_exact import assert_equal, expected, run

from geomx_cli.core.events import EventLog, read_events

FULL = Path("/dev/full")


def test_events_are_read_as_they_were_written_and_a_line_under_way_is_left(tmp_path: Path) -> None:
    path = tmp_path / "events" / "worker.jsonl"
    log = EventLog(path, party="A", role="worker", rank=1)
    log.write("state", state="waiting")
    log.write("round", round=1, loss=0.5)
    with path.open("ab") as file:
        file.write(b'no event\n"neither"\n{"event": "finished"')
    found = list(read_events(path))
    assert [event["event"] for event, _ in found] == ["state", "round"]
    assert all((event["party"], event["role"], event["rank"]) == ("A", "worker", 1) for event, _ in found)
    assert list(read_events(path, found[0][1])) == found[1:]
    log.close()
    log.write("dropped")


def test_a_full_disk_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(FULL)
    for number in range(3):
        log.write("warning", message=f"this is number {number}")
    log.close()
    assert capsys.readouterr().err == "no more events are written to /dev/full: No space left on device\n"


@pytest.mark.processes
def test_nothing_is_raised_when_that_cannot_be_told_either() -> None:
    script = """if True:
        import sys
        from pathlib import Path
        from geomx_cli.core.events import EventLog
        log = EventLog(Path("/dev/full"), talk=sys.stderr)
        for _ in range(3):
            log.write("warning", message="nobody hears it")
        print("went on")
    """
    with FULL.open("wb") as stderr:  # which Python itself may end with status 120 for
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, check=False)
    assert done.stdout == b"went on\n"


def test_what_cannot_be_logged_is_still_said(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(FULL, talk=sys.stderr)
    log.write("warning", message="listen")
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
        assert cluster.output(name).count("no more events are written to") == 1
