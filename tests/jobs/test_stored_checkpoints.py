"""Checkpoints beyond the hosts: a job whose machines and files are lost goes on from a folder or from S3."""

import re
import shutil
from pathlib import Path

import pytest
from cluster import free_ports
from desk import Desk
from forked_launch import ForkedLaunch
from idx import write_data
from jobs.test_checkpoints import WORDS, parameters, rounds
from s3_server import BUCKET, s3_server, silent_s3

pytestmark = pytest.mark.processes


def test_jobs_whose_machines_are_lost_go_on_from_s3_with_the_same_bits(desk: Desk, tmp_path: Path) -> None:
    words = [*WORDS, "--parties", "1", "--data-dir", str(write_data(tmp_path / "idx", 2 * 300, 64))]
    calm = ForkedLaunch.run(desk, "--job-dir", str(tmp_path / "calm"), *words, imported="geomx")
    assert calm.returncode == 0, calm.errors

    words += ["--wan", "40ms"]  # so that there is time for uploads
    place = f"s3://{BUCKET}/checkpoints"
    with s3_server(tmp_path) as s3:
        desk.environment.update(s3.environment)
        words += ["--checkpoint-to", place]
        first = ForkedLaunch.run(desk, *words, "--detach", "--job-dir", str(tmp_path / "first"), imported="geomx")
        assert first.returncode == 0 and "taken only by geomx stop" in first.errors
        first.wait_for(lambda: rounds(tmp_path / "first") >= 10)
        stopped = desk.geomx("stop", str(tmp_path / "first"))
        assert "goes on from the checkpoint" in stopped.stdout, stopped.stderr
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
        s3.files.pipe_file(f"{BUCKET}/checkpoints/{name}/9999999999/A/A-worker-0/state", b"half of it")
        words = ["--resume", f"{place}/{name}", "--job-dir", str(tmp_path / "third")]
        third = ForkedLaunch.run(desk, *words, imported="geomx")
        assert third.returncode == 0, third.errors
        assert "9999999999: skipped: it is half written" in third.errors
    assert parameters(tmp_path / "third") == parameters(tmp_path / "calm") != set()
    assert 0 < rounds(tmp_path / "third") < rounds(tmp_path / "calm")


def test_a_store_that_never_answers_delays_nothing_for_long(desk: Desk, tmp_path: Path) -> None:
    words = [*WORDS, "--parties", "1", "--wan", "100ms", "--timeout", "8s", "--checkpoint-every", "1s"]
    words += ["--data-dir", str(write_data(tmp_path / "idx", 2 * 8000, 64)), "--job-dir", str(tmp_path / "job")]
    with silent_s3() as environment:
        desk.environment.update(environment)
        place = f"s3://{BUCKET}/checkpoints"
        job = ForkedLaunch.begin(desk, *words, "--checkpoint-to", place, imported="geomx")
        errors = desk.folder / f"{job.mark}.err"
        job.wait_for(lambda: errors.exists() and f"no checkpoint in {place}: " in errors.read_text())
        assert f"{place} has not answered for 8.0 s" in errors.read_text()
        had = rounds(tmp_path / "job")
        job.wait_for(lambda: rounds(tmp_path / "job") > had + 5)
        stopped = desk.geomx("stop", str(tmp_path / "job"))
        assert f"the checkpoint is on the hosts only, not in {place}" in stopped.stderr
        assert "has not answered for 8.0 s" in stopped.stderr
        assert "goes on from the checkpoint" in stopped.stdout and stopped.returncode == 0
        assert job.finish() == 75


def inventory(path: Path, *names: str) -> Path:
    """An inventory of two machines, which are this one: of the central party, and of a party with two workers."""
    lines, ports = ['central = "central"', "[defaults]", 'env = { TOKEN = "hush" }'], free_ports(6)
    for index, (party, name) in enumerate(zip(("central", "A"), names, strict=True)):
        lines += ["[[host]]", f'name = "{name}"', f'party = "{party}"', "local = true"]
        lines += [f"ports = {ports[3 * index : 3 * index + 3]}", *(['devices = ["cpu", "cpu"]'] * index)]
    path.write_text("\n".join(lines))
    return path


def test_a_job_goes_on_on_other_machines(desk: Desk, tmp_path: Path) -> None:
    had, has = inventory(tmp_path / "had.toml", "old-1", "old-2"), inventory(tmp_path / "has.toml", "new-1", "new-2")
    words = [*WORDS, "--data-dir", str(write_data(tmp_path / "idx", 2 * 800, 64)), "--hosts", str(had)]
    place = tmp_path / "shared"
    words += ["--checkpoint-to", str(place), "--job-dir", str(tmp_path / "first")]
    first = ForkedLaunch.begin(desk, *words, imported="geomx")
    first.wait_for(lambda: rounds(tmp_path / "first") >= 10)
    first.process.terminate()
    assert first.finish() == 75 and f"--resume {place}" in first.errors
    shutil.rmtree(tmp_path / "first")
    records = list(place.glob("*/*/complete.json"))
    assert records and not [path for path in place.rglob("*") if path.is_file() and b"hush" in path.read_bytes()]

    lacking = desk.geomx("launch", "--resume", str(place))
    assert lacking.returncode == 3 and "lacks the values of the inventory's env: TOKEN" in lacking.stderr
    words = ["--resume", str(place), "--hosts", str(has), "--job-dir", str(tmp_path / "second")]
    second = ForkedLaunch.run(desk, *words, imported="geomx")
    assert second.returncode == 0, second.errors
    assert (tmp_path / "second" / "hosts" / "new-2").is_dir()
    assert 0 < rounds(tmp_path / "second") <= 400 - 10 and parameters(tmp_path / "second")
