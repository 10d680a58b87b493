"""Summaries of runs: ESync's own JSON exactly, our additions, and damaged records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from records import PHASES, esync_record, sync_record, write

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.observe.report import RunRecords, Summary
from geomx_cli.observe.report.modes import title
from geomx_cli.observe.report.run_folders import one_run

pytestmark = pytest.mark.processes

DEVICES = [(host, device) for host in ("cloud1", "cloud3") for device in ("cpu", "gpu0", "gpu1")]


@pytest.fixture
def esync(tmp_path: Path) -> Path:
    """Six workers, six rounds: one step on CPUs, three on the others; cloud3's gpu0 evaluates."""
    for host, device in DEVICES:
        for number in range(1, 7):
            record = esync_record(number, 1 if device == "cpu" else 3, evaluator=(host, device) == ("cloud3", "gpu0"))
            write(tmp_path / "resnet18-v1" / "esync" / host / device, number, record)
    return tmp_path


def summarize(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "geomx_cli", "summarize", *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)


def test_esyncs_own_json_to_the_letter(esync: Path) -> None:
    done = summarize("-b", esync, "-n", "resnet18-v1", "-m", "esync")
    assert done.returncode == 0, done.stderr
    text = (esync / "resnet18-v1" / "esync" / "ESync.json").read_text()
    fast = {
        "accuracy_list": [0.223, 0.347, 0.47, 0.594, 0.717, 0.841], "num_samples_list": [192] * 6,
        "self_iters_list": [4] * 6, "elapsed_time_list": [10, 21, 31, 42, 52, 62], "aggregate_time_list": [2.5] * 6,
    }  # fmt: skip
    quiet = {**fast, "accuracy_list": []}
    slow = {**quiet, "num_samples_list": [64] * 6, "self_iters_list": [2] * 6}
    wanted = {
        "cloud1": {"cpu": slow, "gpu0": quiet, "gpu1": quiet},
        "cloud3": {"cpu": slow, "gpu0": fast, "gpu1": quiet},
    }
    assert text == json.dumps(wanted)


def test_what_esyncs_json_lacks(tmp_path: Path) -> None:
    folder = tmp_path / "cnn" / "hfa"
    told = {"bytes_sent": 1000, "bytes_received": 500, "compute": 3.0, "communicate": 1.0, "wait": 0.25}
    for device in ("cpu0", "cpu1"):
        for number in range(1, 5):
            judged = {"accuracy": 0.3 * number} if device == "cpu0" and number % 2 else {}
            seconds = 5.0 * number * (1 if device == "cpu0" else 2)
            time = {str(step): PHASES for step in range(20)}
            record = {"time": time, "num_samples": 1280, "total_time": seconds, **told, **judged}
            write(folder / "A" / device, number, record)
    done = summarize("-b", tmp_path, "-n", "cnn", "-m", "hfa", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((folder / "summary.json").read_text()) and (folder / "HFA.json").exists()
    wanted = {
        "schema_version": 1, "parity": False, "network": "cnn",
        "mode": "hfa", "rounds": 4, "samples": 8 * 1280, "seconds": 40.0,
        "samples_per_s": 256.0, "traffic": pytest.approx(0.0003), "busy": pytest.approx((12 / 20 + 12 / 40) / 2),
        "bytes": {"sent": 8000, "received": 4000, "wan": None}, "accuracy": pytest.approx(0.9), "problems": [],
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    reached = {"seconds": 15.0, "accuracy": pytest.approx(0.9), "bytes": 4 * 1500, "wan_bytes": None}
    assert found["target"] == {"accuracy": 0.8, "reached": reached}, "cpu1 had ended one round by then, cpu0 three"
    one = found["workers"]["A"]["cpu0"]
    assert (one["compute"], one["communicate"], one["wait"]) == (12.0, 4.0, 1.0)
    assert [point["seconds"] for point in one["accuracy"]] == [5.0, 15.0]


def test_formulas_of_esyncs_drawer(esync: Path, tmp_path: Path) -> None:
    summary = Summary.of(RunRecords.read(esync / "resnet18-v1" / "esync"), 0.8, parity=True)
    assert (summary.samples_per_s, summary.traffic, round(summary.busy, 4)) == (86, 24, 0.7581)
    for host, device in DEVICES:
        for number in range(1, 3 if device == "cpu" else 7):
            write(tmp_path / "resnet18-v1" / "async" / host / device, number, sync_record(number))
    run = RunRecords.read(tmp_path / "resnet18-v1" / "async")
    assert Summary.of(run, 0.8, parity=True).samples_per_s == 85, "over the time of the first, which ended early"
    assert Summary.of(run, 0.8, parity=False).samples_per_s == pytest.approx(28 * 64 / 62.4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "it is empty"),
        ('{"num_iters": 3, "time": {"0": {"get_b', "it is no whole record: "),
        ("[1, 2]", "it is no whole record: "),
        ('{"num_iters": 3, "time": {}, "num_samples": 64}', "it is no whole record: "),
        ('{"num_iters": 9, "time": {}, "num_samples": 64, "total_time": 1.5}', "it is a record of round 9"),
        ('{"num_iters": 3, "time": {}, "num_samples": -1, "total_time": 1.5}', "its numbers make no sense"),
        ('{"num_iters": 3, "time": {"x": {}}, "num_samples": 1, "total_time": 1.5}', "its numbers make no sense"),
        ("[" * 200_000, "it is no whole record: "),
        (" " * (4 << 20) + "  ", "it has more than 4 MiB"),
    ],
)  # fmt: skip
def test_a_damaged_record_is_named_and_the_rest_summed_up(esync: Path, content: str, reason: str) -> None:
    folder = esync / "resnet18-v1" / "esync" / "cloud1" / "gpu0"
    write(folder, 3, content)
    done = summarize("-b", esync, "-n", "resnet18-v1", "-m", "esync")
    assert done.returncode == 7 and f"warning: {folder}/iter-3.txt: {reason}" in done.stderr
    found = json.loads((folder.parent.parent / "ESync.json").read_text())
    assert found["cloud1"]["gpu0"]["elapsed_time_list"] == [10, 21, 42, 52, 62]
    (problem,) = json.loads((folder.parent.parent / "summary.json").read_text())["problems"]
    assert problem.startswith(f"{folder}/iter-3.txt: {reason}")


def test_records_that_are_missing_or_there_twice(esync: Path) -> None:
    folder = esync / "resnet18-v1" / "esync" / "cloud3" / "cpu"
    for number in (2, 3):
        (folder / f"iter-{number}.txt").unlink()
    (folder / "iter-05.txt").write_text((folder / "iter-5.txt").read_text())
    (folder / "iter-1.txt").unlink()
    (folder / "iter-1.txt").mkdir()
    (folder / "notes.txt").write_text("not a record")
    done = summarize("-b", esync, "-n", "resnet18-v1", "-m", "esync")
    assert done.returncode == 7
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert warnings[0] == f"warning: {folder}/iter-1.txt: it cannot be read: Is a directory"
    assert warnings[1] == f"warning: {folder}: there is no record of round 2 to 3"
    assert warnings[2].endswith("there is another record of round 5") and len(warnings) == 3


def test_what_cannot_be_summed_up(esync: Path) -> None:
    with pytest.raises(InvalidSettings, match="there are no records in"):
        one_run(esync, "resnet18-v1", "hfa")
    with pytest.raises(InvalidSettings, match="there is no mode 'fast'"):
        one_run(esync, "resnet18-v1", "fast")
    assert summarize("-b", esync, "-n", "cnn", "-m", "esync").returncode == 3
    assert summarize("-b", esync, "-n", "cnn", "-m", "esync", "--target", "80").returncode == 2
    assert title("dcasgd-niid") == "DCASGD-Non-IID"
