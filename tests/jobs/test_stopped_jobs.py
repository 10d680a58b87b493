"""Jobs that end by themselves when they are asked to stop: the bundled one, and MXNet scripts. Those of PyTorch are in
tests/pytorch/test_preemption.py.
"""

import json
import os
import signal
from pathlib import Path

import pytest
from cluster import ROOT
from desk import Desk, Launch
from idx import write_data

SCRIPT = str(ROOT / "tests" / "scripts" / "preempted.py")
PARTIES = ("--json", "--grace", "60s", "--parties", "2")


def rounds(job: Launch) -> int:
    """How many each of the four workers has recorded at least: in "mixed" one may start when others train already."""
    logs = [path.read_text() for path in job.directory.glob("events/[AB]-worker-*.jsonl")]
    return min(log.count('"round"') for log in logs) if len(logs) == 4 else 0


@pytest.mark.parametrize("algorithm", ["fsa", pytest.param("mixed", marks=pytest.mark.thorough)])
def test_the_bundled_job_stops_in_one_round_and_saves_its_model(desk: Desk, tmp_path: Path, algorithm: str) -> None:
    data = write_data(tmp_path / "data", 512, 64)
    words = ["--network", "linear", "--data-dir", str(data), "--batch-size", "16", "--epochs", "100000"]
    job = desk.train(*PARTIES, "--workers", "2", "--algo", algorithm, *words)
    job.wait_for(lambda: rounds(job) > 5 or job.process.poll() is not None)
    os.kill(job.pid("B/worker:0"), signal.SIGTERM)
    assert job.finish() == 75, job.errors
    result, ends = json.loads(job.output), job.finished()
    assert (result["status"], len(ends)) == ("stopped", 4)
    assert {end["stopped"] for end in ends.values()} == {"asked"}
    assert len({end["parameters"] for end in ends.values()}) == 1
    if algorithm == "fsa":
        assert len({end["rounds"] for end in ends.values()}) == 1
        saved = [path.parent.name for path in job.directory.glob("outputs/*/optimizer.safetensors")]
        assert sorted(saved) == ["A-global_server-0", "B-global_server-1"], "servers end by themselves"
    manifest = json.loads((job.directory / "outputs" / "A-worker-0" / "manifest.json").read_bytes())
    assert manifest["stopped"] == "asked" and Path(result["model"]).exists()
    job.assert_clean()


def test_an_mxnet_script_stops_after_the_same_push(desk: Desk) -> None:
    job = desk.train(*PARTIES, "--workers", "1", "--detach", "--", "python", SCRIPT)
    assert job.finish() == 0, job.errors
    job.wait_for(lambda: len(list(desk.folder.glob("trains-*"))) == 2)
    assert desk.geomx("stop").returncode == 0
    steps = [path.read_text() for path in sorted(desk.folder.glob("stopped-*"))]
    assert len(steps) == 2 and steps[0] == steps[1]
    attached = desk.geomx("attach")
    assert attached.returncode == 75 and "was stopped by geomx stop" in attached.stderr
