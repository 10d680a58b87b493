"""Workers that end without a contribution to any round are named, once."""

import json
from pathlib import Path

import pytest
from cluster import ROOT
from desk import Desk

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
def test_who_has_not_pushed(
    desk: Desk, tmp_path: Path, idle: str, what: str, options: str, wanted: str, logged: int
) -> None:
    job = tmp_path / "job"
    done = desk.geomx(
        "launch", "--local", "--workers", "1", "--job-dir", str(job), *options.split(), "--", "python", str(SCRIPT),
        idle, what, limit=100,
    )  # fmt: skip
    logs = [path.read_text() for path in sorted((job / "logs").glob("*.log"))]
    assert done.returncode == 0, (done.stderr, logs)
    assert (done.stdout + done.stderr).count(wanted or "WARNING") == bool(wanted), done.stdout + done.stderr
    assert sum(text.count("has contributed to no round") for text in logs) == logged, logs
    assert json.loads((job / "state.json").read_text())["result"]["warnings"] == list(filter(None, [wanted]))
    status = desk.geomx("status", str(job))
    assert status.stdout.count("warning:") == bool(wanted) and wanted in status.stdout
    records = desk.geomx("logs", "collect", str(job), "--to", str(tmp_path / "records"))
    assert records.returncode == 0, records.stderr
    (made,) = (tmp_path / "records").rglob("job.json")
    kept = [text.partition(": ")[2] for text in json.loads(made.read_text())["warnings"]]
    assert kept == list(filter(None, [wanted]))
