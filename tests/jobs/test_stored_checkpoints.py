"""Checkpoints beyond the hosts: a job whose machines and files are lost goes on from a folder or from S3."""

import re
import shutil
from pathlib import Path

import pytest
from desk import Desk
from idx import write_data
from jobs.test_checkpoints import WORDS, parameters, rounds
from s3_server import BUCKET, s3_server

pytestmark = pytest.mark.processes


def test_jobs_whose_machines_are_lost_go_on_from_s3_with_the_same_bits(desk: Desk, tmp_path: Path) -> None:
    words = [*WORDS, "--data-dir", str(write_data(tmp_path / "idx", 4 * 2000, 64))]
    calm = desk.geomx("launch", "--job-dir", str(tmp_path / "calm"), *words)
    assert calm.returncode == 0, calm.stderr

    place = f"s3://{BUCKET}/checkpoints"
    with s3_server(tmp_path) as s3:
        desk.environment.update(s3.environment)
        first = desk.train(*words, "--detach", "--checkpoint-to", place, "--job-dir", str(tmp_path / "first"))
        first.found = tmp_path / "first"
        assert first.finish() == 0 and "taken only by geomx stop" in first.errors
        first.wait_for(lambda: rounds(tmp_path / "first") >= 10)
        stopped = desk.geomx("stop", str(tmp_path / "first"), **s3.environment)
        assert "goes on from the checkpoint" in stopped.stdout, stopped.stderr
        first.end()
        shutil.rmtree(tmp_path / "first")

        second = desk.train("--resume", place, "--checkpoint-every", "1s", "--job-dir", str(tmp_path / "second"))
        second.found = tmp_path / "second"
        second.wait_for(lambda: len(s3.find("complete.json")) >= 2)
        errors = second.end()  # by SIGKILL, with all that it runs
        assert re.search(r"going on from the checkpoint of .* of job \S+", errors)
        shutil.rmtree(tmp_path / "second")

        several = desk.geomx("launch", "--resume", place)
        assert several.returncode == 3 and "has checkpoints of 2 jobs" in several.stderr
        name = max(path.split("/")[2] for path in s3.find("complete.json"))
        with s3.files() as files:
            files.pipe_file(f"{BUCKET}/checkpoints/{name}/9999999999/A/A-worker-0/state", b"half of it")
        third = desk.geomx("launch", "--resume", f"{place}/{name}", "--job-dir", str(tmp_path / "third"))
        assert third.returncode == 0, third.stderr
        assert "9999999999: skipped: it is half written" in third.stderr
        missing = desk.geomx("launch", "--resume", "s3://missing/checkpoints")
    assert parameters(tmp_path / "third") == parameters(tmp_path / "calm") != set()
    assert 0 < rounds(tmp_path / "third") < rounds(tmp_path / "calm")
    assert missing.returncode == 3 and "s3://missing/checkpoints has no checkpoint" in missing.stderr
