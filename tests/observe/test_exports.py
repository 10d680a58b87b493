"""Export of a job's metrics to TensorBoard's event files and Prometheus."""

import contextlib
import http.client
import json
import socket
import struct
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import free_ports
from desk import Desk
from idx import write_data
from plans import planned
from tensorboardX.proto.event_pb2 import Event as BoardEvent

from geomx_cli.commands._exports import Exports
from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.events import parse
from geomx_cli.jobs.view.progress import Progress

EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("A/worker:0", {"time": 1000.0, "event": "telemetry", "round": 1, "loss": 2.5, "samples_per_s": 40.0,
                    "waiting": 0.25, "bytes": {"lan": [5, 6], "wan": [1_000_000, 2_000_000], "peers": {}}}),
    ("A/worker:0", {"time": 1001.0, "event": "telemetry", "round": 1, "loss": 2.4}),
    ("A/worker:0", {"time": 1002.0, "event": "telemetry", "round": 3, "loss": float("nan")}),
    ("A/worker:0", {"time": 1003.0, "event": "evaluation", "round": 2, "accuracy": 0.5}),
    ("A/worker:0", {"time": 1004.0, "event": "finished", "rounds": 3, "accuracy": 0.75}),
    ("B/worker:0", {"time": 1004.0, "event": "telemetry", "round": "many", "loss": "low", "bytes": 7}),
    ("A/worker:0", {"time": 1005.0, "event": "reported", "step": 40, "total_time": 5.0, "loss": 0.5, "samples": 8,
                    "accuracy": 0.25, "metrics": {"loss": 7.0, "lr": float("nan")}, "live": True}),
    ("A/scheduler:0", {"time": 1006.0, "event": "telemetry", "state": "serving"}),
    ("nobody", {"event": "telemetry"}),
]  # fmt: skip


@contextlib.contextmanager
def exported(*arguments: Any) -> Iterator[Callable[[str, dict[str, Any]], None]]:
    """`Exports` of a job, and a function that takes an event as from an event log."""
    plan = planned()
    progress = Progress.of(plan, 0.0)
    with contextlib.closing(Exports(*arguments)) as exports:
        exports.open(progress, plan.spec.options)

        def take(process: str, fields: dict[str, Any]) -> None:
            with contextlib.suppress(ValueError):
                if (event := parse(fields)) is not None:
                    progress.apply(process, event, event.time)
                    exports.on_event(process, event)

        yield take


def scalars(folder: Path) -> Iterator[tuple[str, int, float, float]]:
    """(tag, step, value, time) of each, parsed from the records: length, its checksum, the event, its checksum."""
    (path,) = folder.glob("events.out.tfevents.*")
    content = path.read_bytes()
    while content:
        (size,) = struct.unpack("<Q", content[:8])
        event, content = BoardEvent.FromString(content[12 : 12 + size]), content[16 + size :]
        for value in event.summary.value:
            yield value.tag, event.step, value.simple_value, event.wall_time


def test_tensorboard(tmp_path: Path) -> None:
    with exported(str(tmp_path), None) as take:
        for process, event in EVENTS:
            take(process, event)
    assert list(scalars(tmp_path / "job-1")) == [
        ("loss/A/worker-0", 1, 2.5, 1000.0), ("samples_per_s/A/worker-0", 1, 40.0, 1000.0),
        ("waiting/A/worker-0", 1, 0.25, 1000.0), ("wan_MB/A/worker-0", 1, 3.0, 1000.0),
        ("accuracy", 2, 0.5, 1003.0), ("accuracy", 3, 0.75, 1004.0), ("loss/A/worker-0", 40, 0.5, 1005.0),
        ("accuracy/A/worker-0", 40, 0.25, 1005.0), ("metric/loss/A/worker-0", 40, 7.0, 1005.0),
    ]  # fmt: skip


def test_prometheus() -> None:
    (port,) = free_ports(1)
    with exported(None, port) as take:
        for process, event in EVENTS:
            take(process, event)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as answer:
            lines = answer.read().decode().splitlines()
        with pytest.raises(CheckFailed, match=f"cannot listen on 127.0.0.1:{port}"), exported(None, port):
            pass
    labels = 'job="job-1",party="A",process="A/worker:0",role="worker"'
    for line in (
        'geomx_accuracy{job="job-1"} 0.75', f"geomx_loss{{{labels}}} 0.5", f"geomx_round{{{labels}}} 3.0",
        'geomx_metric{job="job-1",name="lr",party="A",process="A/worker:0",role="worker"} NaN',
        f"geomx_step{{{labels}}} 40.0", f"geomx_waiting{{{labels}}} 0.25", f"geomx_samples_per_s{{{labels}}} 0.0",
        'geomx_bytes_total{direction="received",job="job-1",net="lan",party="A",process="A/worker:0",role="worker"}'
        " 6.0",
    ):  # fmt: skip
        assert line in lines, line
    assert not any("geomx_round" in line and "scheduler" in line for line in lines), "which has no rounds"
    assert not any("B/worker:0" in line for line in lines), "which has said nothing that makes sense"
    with exported(None, port):
        pass  # the port is free again


def test_a_launch_that_exports(desk: Desk, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data")
    words = ["--local", "--workers", "1", "--data-dir", str(data), "--batch-size", "16", "--epochs", "6"]
    words += ["--network", "linear"]
    done = desk.geomx("launch", *words, "--tensorboard", str(tmp_path / "runs"), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    found = list(scalars(tmp_path / "runs" / result["job"]))
    last = {tag: (step, value) for tag, step, value, _ in found}
    assert last["accuracy"] == (result["rounds"], pytest.approx(result["accuracy"]))
    assert {"loss/A/worker-0", "loss/B/worker-0"} <= {tag for tag, *_ in found}


def test_prometheus_answers_only_by_its_own_name_and_with_the_token(tmp_path: Path) -> None:
    (port,), token = free_ports(1), tmp_path / "token"
    token.write_text("s3cret-of-16-characters\n")
    known = {"Authorization": "Bearer s3cret-of-16-characters"}
    with exported(None, port, str(token)):
        for headers, status in (
            (known, 200), (known | {"Host": "evil.example"}, 403), ({}, 401), ({"Authorization": "Bearer x"}, 401),
            (known | {"Host": f"localhost:{port}"}, 200),
        ):  # fmt: skip
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
            connection.request("GET", "/metrics", headers=headers)
            assert connection.getresponse().status == status, headers
            connection.close()
    token.write_text("short")
    with pytest.raises(InvalidSettings, match="has no token"), exported(None, port, str(token)):
        pass


def test_what_cannot_be_exported_to_is_said_before_anything_is_started(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        for words, status, said in (
            (["--tensorboard", str(tmp_path / "file")], 2, "is a file"),
            (["--tensorboard", str(tmp_path / "file" / "deeper")], 5, "cannot write to"),
            (["--metrics-port", str(port)], 5, f"cannot listen on 127.0.0.1:{port}"),
            (["--metrics-port", "9600", "--detach"], 2, "with --detach nothing is exported"),
        ):
            done = desk.geomx("launch", "--local", *words)
            assert done.returncode == status and said in done.stderr, done.stderr
            assert not desk.state_files("agent-state.json"), "nothing was started"


def test_a_second_export_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(2):
        with exported(str(tmp_path), None) as take:
            take(*EVENTS[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-1", "job-1-2"]
    assert len(list(scalars(tmp_path / "job-1"))) == len(list(scalars(tmp_path / "job-1-2"))) == 4


def test_a_disk_that_hangs_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr("geomx_cli.observe.exports.scalars.LIMIT", 0.2)
    monkeypatch.setattr("tensorboardX.SummaryWriter.add_scalar", lambda *_, **__: release.wait())
    with exported(str(tmp_path), None) as take:
        for number in range(20_000):
            take("A/worker:0", {**EVENTS[0][1], "round": number})
    release.set()  # the export has ended by now
