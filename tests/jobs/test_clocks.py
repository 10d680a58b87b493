"""Hosts whose clocks are wrong: all times are by the clock of the machine that launched the job."""

import json
import sys
import time
from pathlib import Path

import pytest
from cluster import ROOT
from desk import Desk
from idx import write_data

from geomx_cli.core.conventions import JobClock
from geomx_cli.core.jsonlines import read_objects

HOUR = 3600


def test_setting_the_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    clock, ahead = JobClock(), JobClock(HOUR)
    monkeypatch.setattr(time, "time", lambda: now - 7 * HOUR)
    assert now <= clock.time() < now + 30
    assert now - HOUR <= ahead.time() < now - HOUR + 30


def _inventory(folder: Path, skews: dict[str, int]) -> str:
    lines = ['central = "hub"']
    for name, skew in skews.items():
        python = folder / f"python-{name}"
        shim = ROOT / "tests/scripts/skewed_clock.py"
        python.write_text(f'#!/bin/sh\nSKEW={skew} exec {sys.executable} {shim} "$@"\n')
        python.chmod(0o755)
        lines += ["[[host]]", "local = true", f'name = "{name}"', f'party = "{name}"', f'python = "{python}"']
        lines += ['devices = ["cpu"]'] if name != "hub" else []
    return "\n".join(lines)


@pytest.mark.processes
def test_a_job_of_hosts_with_wrong_clocks(desk: Desk, tmp_path: Path) -> None:
    (desk.folder / "hosts.toml").write_text(_inventory(desk.folder, {"hub": 0, "early": -HOUR, "late": HOUR}))
    data = write_data(tmp_path / "idx", 128, 32)
    words = ["--network", "linear", "--data-dir", str(data), "--batch-size", "8", "--epochs", "4", "--job-dir", "job"]
    began = time.time()
    done = desk.geomx("launch", *words, "--eval-every", "5")
    ended = time.time()
    assert done.returncode == 0, done.stderr
    for name, way in (("early", "behind"), ("late", "ahead of")):
        assert f"warning: {name}: its clock is 1 h 00 min {way} that of this machine" in done.stderr
    for log in (desk.folder / "job" / "events").iterdir():
        times = [event["time"] for event, _ in read_objects(log)]
        assert times and began - 1 < min(times) and max(times) < ended + 1, log.name
    statuses = list((desk.folder / "job" / "hosts").glob("*/status.json"))
    assert len(statuses) == 3
    for status in statuses:
        assert began < json.loads(status.read_bytes())["time"] < ended + 1, status
    records = desk.folder / "records"
    assert desk.geomx("logs", "collect", "--to", str(records)).returncode == 0
    (run,) = records.rglob("job.json")
    found = json.loads(run.read_bytes())
    assert max(found["starts"].values()) < 60 and max(found["seconds"]) < ended - began, found
