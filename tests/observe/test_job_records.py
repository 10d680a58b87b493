"""From a job's event logs to the records of its workers' rounds and the metadata."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from desk import Desk
from plans import planned

from geomx_cli.core import plugins
from geomx_cli.core.conventions import number_before
from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.files import locked_folder
from geomx_cli.core.options import defaults
from geomx_cli.observe.report import RunRecords, Summary, collected
from geomx_cli.observe.report.figures import metric_curve
from geomx_cli.observe.report.metadata import Metadata
from geomx_cli.observe.report.run_folders import runs_below
from geomx_cli.observe.report.run_records import JobRecords, mode_of, network_of

BEGAN = 1000.0
PEERS = {"A/server:0": "central/global_server:0", "B/server:0": "central/global_server:0"}


def write(folder: Path, process: str, *events: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{process.replace('/', '-').replace(':', '-')}.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def round_(number: int, seconds: float, **fields: Any) -> dict[str, Any]:
    """Two local steps, then the exchange."""
    step = {"get_batch": 0.01, "forward and backward": 0.2, "local update": 0.05}
    usual = {
        "time": BEGAN + seconds, "event": "round", "num_iters": number, "num_samples": 128, "total_time": seconds,
        "times": {"0": step, "1": step, "2": {"global update": 0.5}}, "loss": 1 / number, "bytes_sent": 100,
        "bytes_received": 50, "compute": 0.5, "communicate": 0.5, "wait": 0.4,
    }  # fmt: skip
    return {**usual, **fields}


def telemetry(seconds: float, sent: int, peer: str) -> dict[str, Any]:
    counted = {"lan": [7, 7], "wan": [sent, 2 * sent], "peers": {peer: [sent, 2 * sent], "an unknown peer": [3, 3]}}
    return {"time": BEGAN + seconds, "event": "telemetry", "state": "serving", "bytes": counted}


MINE = """
import numpy as np
from mxnet.gluon import nn

def data(split, folder):
    labels = np.arange(96 if split == "train" else 30_000) % 3  # evaluated in several pieces
    images = np.random.RandomState(1).rand(len(labels), 2, 6, 6).astype(np.float32)
    images[np.arange(len(labels)), 0, labels] += 3
    return images, labels

def network(classes):
    net = nn.HybridSequential()
    net.add(nn.Conv2D(4, 3, activation="relu"), nn.BatchNorm(), nn.Dense(classes))
    return net
"""


def written(job: JobRecords, place: Path) -> RunRecords:
    """The run as written to `place` and read again."""
    collected._write_records(job, place, "runs", empty=True)
    return RunRecords.read(place)


@pytest.fixture
def events(tmp_path: Path) -> Path:
    """Events of three rounds: A/worker:0 evaluates after the first and at the end."""
    folder = tmp_path / "raw" / "events"
    for name in ("A/worker:0", "A/worker:1", "B/worker:0", "B/worker:1"):
        write(folder, name, {"time": BEGAN, "event": "state", "state": "training"})
        write(folder, name, *(round_(number, 2.0 * number) for number in (1, 2, 3)))
    write(
        folder, "A/worker:0", {"time": BEGAN + 5, "event": "evaluation", "round": 1, "accuracy": 0.7, "seconds": 0.1},
        {"time": BEGAN + 7, "event": "finished", "rounds": 3, "samples": 384, "seconds": 6.0, "accuracy": 0.85},
    )  # fmt: skip
    for process, peer in PEERS.items():
        write(folder, process, *(telemetry(seconds, 1000 * seconds + 1000, peer) for seconds in (-1, 0, 2, 6)))
    return folder


def test_records_of_rounds(events: Path, tmp_path: Path) -> None:
    job = JobRecords.read(planned(algo="hfa"), events)
    records = list(job.logs["A/worker:0"].records())
    assert [record.accuracy for record in records] == [0.7, None, 0.85], "of the round's weights, and at the end"
    assert [record.total_time for record in records] == [2.0, 4.0, 6.0]
    assert records[0].time["2"] == {"global update": 0.5} and records[0].aggregation() == 0.5
    places = {f"{party}/worker:{rank}": (party, f"cpu{rank}") for party in "AB" for rank in (0, 1)}
    assert job.places == places
    summary = Summary.of(written(job, tmp_path / "run"), 0.8, parity=False)
    assert (summary.network, summary.mode, summary.rounds, summary.samples) == ("cnn", "hfa", 3, 12 * 128)
    assert summary.reached is not None and summary.reached.seconds == 6.0
    assert summary.reached.wan_bytes == summary.wan_bytes == 14_000, "both parties' 7000, first weights and all"
    assert summary.bytes == (1200, 600)


def test_reports_of_a_script_are_its_records(tmp_path: Path) -> None:
    folder = tmp_path / "raw" / "events"
    usual = {"event": "reported", "metrics": {"norm": 2.0}}
    write(
        folder, "A/worker:0", {"time": BEGAN, "event": "state", "state": "training"},
        {**usual, "time": BEGAN + 1, "step": 10, "total_time": 1.0, "samples": 64, "loss": 2.0},
        {"time": BEGAN + 2, "event": "telemetry", "round": 7, "bytes": {"lan": [5, 6], "wan": [10, 20]}},
        {**usual, "time": BEGAN + 3, "step": 20, "total_time": 3.0, "samples": 192, "loss": float("nan")},
        {**usual, "time": BEGAN + 4, "step": 20, "total_time": 4.0, "samples": 192, "accuracy": 0.5},
    )  # fmt: skip
    job = JobRecords.read(planned("python", "own.py"), folder)
    place = tmp_path / "base" / "own" / "fsa"
    run = written(job, place)
    summary = Summary.of(run, 0.5, parity=False)
    assert (summary.rounds, summary.samples, summary.seconds, summary.samples_per_s) == (7, 192, 4.0, 48.0)
    assert summary.reached is not None and summary.reached.seconds == 4.0 and summary.busy is None
    assert summary.bytes == (15, 26)
    assert list(metric_curve(run, "loss")) == [(1.0, 2.0)], "not what is not finite"
    assert list(metric_curve(run, "norm")) == [(1.0, 2.0), (3.0, 2.0), (4.0, 2.0)]


def test_traffic_between_parties(events: Path) -> None:
    write(events, "B/worker:1", {"time": BEGAN + 1.5, "event": "sent", "wan": 1500})
    metadata = JobRecords.read(planned(), events).metadata
    assert metadata.traffic == {"central": {}, "A": {"central": 7000}, "B": {"central": 7000}}
    assert metadata.bytes_by(0) == metadata.bytes_by(1.4) == 2000, "what was sent, however far the next count is"
    assert metadata.bytes_by(1.5) == 3500 and metadata.bytes_by(4) == 7500 and metadata.bytes_by(-1) == 0
    assert metadata.bytes_by(100) == 14_000 + 1500 and metadata.total == 14_000
    assert metadata.starts == dict.fromkeys(("A/cpu0", "A/cpu1", "B/cpu0", "B/cpu1"), 0.0)


def test_bytes_of_a_restarted_server_are_added(events: Path) -> None:
    number, server = number_before(1), "A/server:0"
    write(
        events, server, {"time": BEGAN + 7, "number": number, "event": "restarted", "incarnation": 1},
        {**telemetry(8, 500, PEERS[server]), "number": number + 1},
    )  # fmt: skip
    metadata = JobRecords.read(planned(), events).metadata
    assert metadata.restarts == {server: 1} and metadata.traffic["A"] == {"central": 7500}
    assert metadata.bytes_by(7) == 14_000 and metadata.bytes_by(100) == metadata.total == 14_500


def test_goodput_is_the_share_of_the_time_that_became_rounds_which_stayed(tmp_path: Path) -> None:
    folder, name = tmp_path / "raw" / "events", "A/worker:0"
    write(
        folder, name, {"time": BEGAN, "event": "state", "state": "waiting"},
        {"time": BEGAN + 2, "event": "state", "state": "training"},
        *(round_(number, 2.0 + 2 * number) for number in (1, 2, 3)),
        {"time": BEGAN + 12, "number": number_before(1), "event": "restarted", "incarnation": 1},
        {"time": BEGAN + 13, "number": number_before(1) + 1, "event": "state", "state": "training"},
        {**round_(3, 16.0), "number": number_before(1) + 2}, {**round_(4, 18.0), "number": number_before(1) + 3},
        {"time": BEGAN + 20, "number": number_before(1) + 4, "event": "finished", "rounds": 4, "samples": 512,
         "seconds": 18.0},
    )  # fmt: skip
    other = "B/worker:1"  # a script's, which reports each step twice
    write(
        folder, other, {"time": BEGAN, "event": "state", "state": "training"},
        *({"time": BEGAN + when, "event": "reported", "step": step, "total_time": when, "samples": 64 * step}
          for when, step in ((2.0, 1), (3.0, 1), (4.0, 2), (5.0, 2))),
        {"time": BEGAN + 10, "event": "telemetry"},
    )  # fmt: skip
    job = JobRecords.read(planned(), folder)
    assert job.metadata.goodput == {"A/cpu0": (2 + 2 + 3 + 2) / 20, "B/cpu1": 5 / 10}
    summary = Summary.of(written(job, tmp_path / "run"), 0.8, parity=False)
    assert summary.goodput == pytest.approx((0.45 + 0.5) / 2)


def test_bytes_until_an_evaluation_are_by_the_clock_of_its_worker(events: Path, tmp_path: Path) -> None:
    write(events, "B/worker:1", {"time": BEGAN - 1, "event": "state", "state": "training"})
    run = written(JobRecords.read(planned(), events), tmp_path / "run")
    assert run.wan_bytes_by(1.9) == 2000 and run.wan_bytes_by(2.0) == 6000, "A/worker:0 began a second after the first"


def test_devices() -> None:
    alone = JobRecords.read(planned(workers=1), Path("/nowhere"))
    assert alone.places == {"A/worker:0": ("A", "cpu"), "B/worker:0": ("B", "cpu")}
    together = JobRecords.read(planned(one_host=True), Path("/nowhere"))
    assert list(together.places.values()) == [("local", f"cpu{number}") for number in range(4)]
    found = planned(workers=3)
    processes = [
        replace(one, env={**one.env, "GEOMX_DEVICE": f"gpu{one.rank}"}) if one.global_rank in (1, 2) else one
        for one in found.processes
    ]
    mixed = JobRecords(replace(found, processes=tuple(processes)), {})
    assert list(mixed.places.values())[:3] == [("A", "cpu"), ("A", "gpu1"), ("A", "gpu2")]
    processes = [replace(one, env={**one.env, "GEOMX_DEVICE": "gpu1"}) for one in planned().processes]
    shared = JobRecords(replace(planned(), processes=tuple(processes)), {})
    assert list(shared.places.values())[:2] == [("A", "gpu1-0"), ("A", "gpu1-1")], "which is not gpu10"


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"algo": "fsa"}, "fsa"), ({"algo": "sync"}, "sync"), ({"algo": "mixed"}, "mixed"),
        ({"algo": "async", "optimizer": "dcasgd"}, "dcasgd"), ({"algo": "mixed", "optimizer": "dcasgd-a"}, "dcasgd"),
        ({"algo": "fsa", "optimizer": "dcasgd-mxnet"}, "fsa"), ({"algo": "esync", "split": "by-class"}, "esync-niid"),
        ({"algo": "async", "optimizer": "dcasgd", "split": "dirichlet:0.3"}, "dcasgd-niid"),
    ],
)  # fmt: skip
def test_modes(options: dict[str, Any], mode: str) -> None:
    assert mode_of({**defaults(plugins.table()), **options}) == mode


def test_networks() -> None:
    assert network_of(planned(network="resnet18-v1")) == "resnet18-v1"
    assert network_of(planned(network="own.nets:small")) == "own.nets-small"
    assert network_of(planned("python", "folder/train.py", "--lr", "1")) == "train"
    assert network_of(planned("./run")) == ".-run"


def test_written_and_read_again(events: Path, tmp_path: Path) -> None:
    job = JobRecords.read(planned("python", "train.py", "--fast", algo="hfa"), events)
    place = tmp_path / "base" / "train" / "hfa" / "job-1"
    assert collected._write_records(job, place, "runs")
    text = (place / "A" / "cpu1.jsonl").read_text().splitlines()[1]
    assert json.loads(text) == {
        "num_iters": 2, "time": round_(2, 4.0)["times"], "num_samples": 128, "total_time": 4.0, "bytes_sent": 100,
        "bytes_received": 50, "compute": 0.5, "communicate": 0.5, "wait": 0.4, "loss": 0.5,
        "evaluation_on_clock": True,
    }, "and no accuracy"  # fmt: skip
    again = RunRecords.read(place)
    assert [record.accuracy for record in again.rounds("A/cpu0", 2, 3)] == [None, 0.85] and not again.problems
    assert again.metadata is not None and (again.network, again.mode, again.name) == ("train", "hfa", job.plan.job)
    assert again.metadata.script == ["python", "train.py", "--fast"] and again.metadata.options["seed"] == 1
    nothing = JobRecords.read(planned(), tmp_path / "none")
    assert not collected._write_records(nothing, tmp_path / "empty", "runs") and not (tmp_path / "empty").exists()
    assert not collected._write_records(nothing, place, "runs")
    assert (place / "A" / "cpu1.jsonl").read_text().splitlines()[1] == text, "it stays when there is nothing new"
    assert sorted(path.name for path in place.parent.iterdir()) == ["job-1"]
    original = tmp_path / "base" / "train" / "hfa-esync"
    assert collected._write_records(job, original, "esync")
    assert (original / "A" / "cpu1" / "iter-2.txt").read_text() == text
    assert Summary.of(RunRecords.read(original), 0.8, parity=False) == Summary.of(again, 0.8, parity=False)
    assert runs_below(tmp_path / "base") == [place, original]


def test_records_of_another_job_stay(events: Path, tmp_path: Path) -> None:
    place = tmp_path / "base" / "cnn" / "fsa"
    collected._check(place, "job-1", overwrite=False)
    collected._write_records(JobRecords.read(planned(), events), place, "esync")
    collected._check(place, "job-1", overwrite=False)
    with pytest.raises(InvalidSettings, match="has the records of job job-1"):
        collected._check(place, "job-2", overwrite=False)
    collected._check(place, "job-2", overwrite=True)
    (place / "job.json").write_text("{")
    with pytest.raises(InvalidSettings, match="a job that cannot be identified"):
        collected._check(place, "job-1", overwrite=False)
    (place / "job.json").unlink()
    with pytest.raises(InvalidSettings, match="somebody else"):
        collected._check(place, "job-1", overwrite=False)
    with pytest.raises(InvalidSettings, match=r"job.json is damaged"):
        (place / "job.json").write_text("[]")
        Metadata.read(place)
    collected._write_records(JobRecords.read(planned(), events), place / "job-3", "runs")
    with pytest.raises(InvalidSettings, match="has the records of 1 run in folders of their own"):
        collected._check(place, "job-1", overwrite=True)


@pytest.mark.parametrize(
    "event",
    [
        round_(4, 8.0, num_samples=10**30), round_(4, 8.0, times={"x": {}, "y": {}}), round_(4, 1e300),
        round_(4, 8.0, bytes_sent=-1), round_(4, 8.0, wait=-5.0), telemetry(3, 10**400, PEERS["A/server:0"]),
        {"time": 1e300, "event": "state", "state": "training"},
        {"time": 1, "event": "evaluation", "round": 1, "accuracy": 7},
        {"time": float("nan"), "event": "telemetry", "bytes": {"wan": [1, 1], "peers": {}}},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_without_sense_are_named_and_passed_over(events: Path, tmp_path: Path, event: dict[str, Any]) -> None:
    write(events, "A/worker:0", event)
    with (events / "A-worker-0.jsonl").open("a") as file:
        file.write("[" * 50_000 + "\n")  # JSON that no reader accepts
    job = JobRecords.read(planned(), events)
    (problem,) = job.problems
    assert problem.startswith("A/worker:0: an event ")
    run = written(job, tmp_path / "out")
    assert len(run.workers["A"]["cpu0"].samples) == 3 and job.metadata.bytes_by(100) == 14_000
    assert Summary.of(run, 0.8, parity=False).reached is not None


def test_two_collect_one_after_the_other(tmp_path: Path) -> None:
    for file in ("", "new.lock"):
        with locked_folder(tmp_path, file), pytest.raises(CheckFailed, match="another geomx"):  # noqa: SIM117
            with locked_folder(tmp_path, file):
                pass
        with locked_folder(tmp_path, file):
            pass


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with locked_folder(tmp_path), locked_folder(tmp_path):
        assert capsys.readouterr().err.count("cannot be locked (No locks available)") == 2


def test_damaged_events_are_named_and_the_rest_taken(events: Path, tmp_path: Path) -> None:
    write(events, "B/worker:0", {"time": 1, "event": "round", "num_iters": "four"}, {"time": 1, "event": "evaluation"})
    write(events, "B/worker:0", {"event": "telemetry", "time": 1, "bytes": 4}, round_(4, 8.0))
    (events / "A-worker-1.jsonl").unlink()
    (events / "B-worker-1.jsonl").write_text('{"time": 1, "ev')
    job = JobRecords.read(planned(), events)
    run = written(job, tmp_path / "run")
    assert len(run.workers["B"]["cpu0"].samples) == 4
    problems = "\n".join(job.problems)
    for kind in ("round", "evaluation", "telemetry"):
        assert f"B/worker:0: an event {kind!r} in its event log is damaged" in problems
    assert "A/worker:1: its event log cannot be read" in problems and len(job.problems) == 4
    assert not run.workers["B"]["cpu1"].samples
    shutil.rmtree(events)
    assert len(JobRecords.read(planned(), events).problems) == 4


def test_from_a_real_job_to_figures(desk: Desk, tmp_path: Path) -> None:
    """ESync on data by class, with custom networks and data, collected twice, summarized, drawn and compared."""
    (desk.folder / "mine.py").write_text(MINE)
    words = ["--local", "--workers", "1", "--data", "mine:data", "--network", "mine:network", "--batch-size", "8"]
    words += ["--algo", "esync", "--min-local-steps", "24", "--epochs", "40", "--eval-every", "20"]
    words += ["--split", "by-class", "--esync-query", "blocking"]
    done = desk.geomx("launch", *words, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    base = tmp_path / "results"
    for _ in range(2):
        manifest = desk.json("logs", "collect", "--to", str(base))
        place = base / "mine-network" / "esync-niid" / result["job"]
        assert not manifest["problems"] and manifest["records"] == str(place)
    assert sorted(path.name for path in base.iterdir()) == sorted([result["job"], "mine-network"])
    record = json.loads((place / "A" / "cpu.jsonl").read_text().splitlines()[1])
    *steps, exchange = record["time"].values()
    phases = {"forward and backward", "local update", "check ready"}
    assert len(steps) >= 24 and all(phases <= set(step) for step in steps)
    assert "global update" in exchange and record["num_samples"] == 8 * len(steps)
    summary = desk.json("summarize", "-b", str(base), "-n", "mine-network", "-m", "esync-niid", "--target", "0.01")
    assert summary["rounds"] == result["rounds"] and summary["accuracy"] == pytest.approx(result["accuracy"])
    assert summary["target"]["reached"]["seconds"] > 0 and summary["bytes"]["wan"] > 1000
    assert len(json.loads((place / "job.json").read_text())["wan_bytes"]) > 10, "not only once a second"
    accuracies = json.loads((place / "ESync-Non-IID.json").read_text())["A"]["cpu"]["accuracy_list"]
    assert len(accuracies) >= 2, "some before the end, though a round has more steps than there are between evaluations"
    drawn = desk.geomx("draw", "-b", str(base), "-n", "mine-network").stdout.split()
    names = {Path(path).stem for path in drawn}
    assert {"accuracy-niid", "bytes", "timeline-esync-niid", "matrix-esync-niid"} <= names and "accuracy" not in names
    (job,) = desk.json("compare", result["job"])["jobs"]
    assert job["job"] == result["job"] and job["accuracy"] == pytest.approx(result["accuracy"])


def test_rounds_that_a_restarted_worker_repeats_count_once(events: Path, tmp_path: Path) -> None:
    again = [round_(2, 5.0), round_(3, 7.0), round_(4, 8.0), round_(3, 9.5, num_samples=64), round_(4, 10.0)]
    write(events, "A/worker:0", *again)
    job = JobRecords.read(planned(), events)
    run = written(job, tmp_path / "out")
    worker = run.workers["A"]["cpu0"]
    assert not run.problems and list(worker.elapsed) == [2.0, 5.0, 9.5, 10.0]
    assert list(worker.samples) == [128, 128, 64, 128]
