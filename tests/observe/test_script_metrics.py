"""What a script reports is shown and recorded as for the bundled job: from a real job to summaries and figures."""

import json
from pathlib import Path

import pytest
from desk import Desk

SCRIPT = """
import geomx_cli.mxnet as geomx
import mxnet as mx

kv = mx.kv.create("dist_sync")
weight = mx.nd.zeros(4)
kv.init(0, weight)
for step in range(1, 21):
    kv.push(0, mx.nd.ones(4))
    kv.pull(0, out=weight)
    geomx.report(step=10 * step, samples=8, loss=(weight / step).mean(), rank=kv.rank)
    if step % 10 == 0:
        geomx.report(accuracy=step / 40)
"""


def test_a_script_that_reports(desk: Desk) -> None:
    (desk.folder / "own.py").write_text(SCRIPT)
    words = ["--local", "--workers", "1", "--tensorboard", "runs"]
    done = desk.geomx("launch", *words, "--json", "--", "python", "own.py")
    assert done.returncode == 0, done.stderr
    assert "rank scope: global" in done.stderr, "report knows no ranks"
    result = json.loads(done.stdout)
    assert result["accuracy"] == 0.5 and result["loss"] == pytest.approx(2 / 20) and result["samples_per_s"] > 0
    rows = {row["name"]: row for row in desk.json("status")["processes"]}
    assert [rows[f"{party}/worker:0"]["step"] for party in "AB"] == [200, 200]
    assert [rows[f"{party}/worker:0"]["metrics"] for party in "AB"] == [{"rank": 0.0}, {"rank": 1.0}]
    assert any(b"metric/rank/B/worker-0" in path.read_bytes() for path in desk.folder.glob("runs/*/*"))
    assert desk.geomx("logs", "collect", "--to", "results").returncode == 0
    (one,) = desk.json("compare", result["job"])["jobs"]
    assert (one["samples"], one["rounds"], one["accuracy"], one["busy"]) == (2 * 20 * 8, 20, 0.5, None)
    assert one["samples"] / one["seconds"] == pytest.approx(one["samples_per_s"]) == result["samples_per_s"]
    done = desk.geomx("draw", "-b", "results", "-n", "own", "--metric", "rank")
    assert done.returncode == 0, done.stderr
    drawn = {Path(line).stem for line in done.stdout.splitlines()}
    assert {"accuracy", "loss", "metric-rank"} <= drawn and "computing" not in drawn
