"""Workers that end without a contribution to any round are named, once."""

import json
from pathlib import Path

import pytest
from cluster import ROOT
from desk import Desk
from rehearsal import Rehearsal

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "tests" / "scripts" / "no_push.py"
ALL = "no gradients were exchanged: each worker trained alone"
KEYLESS = (
    "no gradients were exchanged: no worker gave its parameters to geomx, as Trainer(..., kvstore=kv) does in MXNet and"
    " geomx.wrap in PyTorch"
)
APART = "nothing was exchanged between parties: the scripts ended before that (in hfa: after K1 x K2 steps)"


@pytest.mark.parametrize(
    ("idle", "what", "options", "wanted", "logged"),
    [
        ("all", "trains", "", ALL, 2),
        ("all", "keyless", "", ALL, 2),
        ("all", "silent", "", KEYLESS, 0),
        ("1", "silent", "", "B/worker:0 contributed to no round", 0),
        ("all", "reads", "", "", 0),
        ("0", "trains", "", "A/worker:0 contributed to no round", 1),
        ("0", "leaves", "", "A/worker:0 contributed to no round", 0),
        ("none", "trains", "", "", 0),
        ("none", "trains", "--algo hfa --k2 2", APART, 0),
        ("none", "trains", "--algo hfa --k2 1", "", 0),
    ],
)
def test_who_has_not_pushed(desk: Desk, idle: str, what: str, options: str, wanted: str, logged: int) -> None:
    job = Rehearsal(
        desk, "--local", "--workers", "1", "--job-dir", "job", *options.split(),
        "--", "python", str(SCRIPT), idle, what, imported="mxnet",
    )  # fmt: skip
    job.finish()
    assert job.errors.count(wanted or "WARNING") == bool(wanted), job.errors
    assert json.loads(job.output)["warnings"] == list(filter(None, [wanted]))
    logs = [path.read_text() for path in sorted(job.directory.glob("logs/*.log"))]
    assert sum(text.count("has contributed to no round") for text in logs) == logged, logs


def test_launch_status_and_records_name_them(desk: Desk, tmp_path: Path) -> None:
    job, wanted = tmp_path / "job", "A/worker:0 contributed to no round"
    words = ("--local", "--workers", "1", "--job-dir", str(job), "--", "python", str(SCRIPT), "0", "trains")
    done = desk.geomx("launch", *words)
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count(wanted) == 1, done.stdout + done.stderr
    assert json.loads((job / "state.json").read_text())["result"]["warnings"] == [wanted]
    status = desk.geomx("status", str(job))
    assert status.stdout.count("warning:") == 1 and wanted in status.stdout
    records = desk.geomx("logs", "collect", str(job), "--to", str(tmp_path / "records"))
    assert records.returncode == 0, records.stderr
    (made,) = (tmp_path / "records").rglob("job.json")
    assert [text.partition(": ")[2] for text in json.loads(made.read_text())["warnings"]] == [wanted]
