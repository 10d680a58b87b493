"""The export to W&B and MLflow: what reaches a client in a child process, whatever becomes of it."""

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from geomx_cli.commands._exports import Exports
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.events import Evaluated, Reported
from geomx_cli.observe.exports import scalars, tracker
from geomx_cli.observe.exports.scalars import Backlog, Scalar
from geomx_cli.observe.exports.tracker import Tracker

SINK = """
import json, sys
from geomx_cli.observe.exports.tracker import main

class Sink:
    def __init__(self, project, job, config):
        print("a client may print anything")
        self.place = f"{project} {job}"
        self.known = {"config": config, "scalars": []}

    def log(self, scalars):
        if any(tag == "metric/broken/A/worker-0" for tag, *_ in scalars):
            raise RuntimeError("no quota")
        self.known["scalars"] += scalars

    def end(self, how):
        open(sys.argv[1], "w").write(json.dumps({**self.known, "end": how}))

sys.exit(main({"wandb": Sink}))
"""

pytestmark = pytest.mark.processes


def tracked(path: Path, *events: Any, code: str = SINK, status: str = "done") -> None:
    one = Tracker("wandb", "mine", "job-1", {"lr": 0.1}, child=(sys.executable, "-c", code, str(path)))
    for event in events:
        one.take("A/worker:0", event)
    one.close(status)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = Reported(time=2.0, step=5, total_time=1.0, loss=0.25, metrics={"loss": 3.0}, live=True)
    tracked(tmp_path / "run", Evaluated(time=1.0, round=1, accuracy=0.5), own)
    assert json.loads((tmp_path / "run").read_text()) == {
        "config": {"lr": 0.1}, "end": "finished",
        "scalars": [
            ["accuracy", 0.5, 1, 1.0], ["loss/A/worker-0", 0.25, 5, 2.0], ["metric/loss/A/worker-0", 3.0, 5, 2.0],
        ],
    }  # fmt: skip
    assert capsys.readouterr().err == "mine job-1\n"
    for status, end in (("failed", "failed"), ("interrupted", "killed")):
        tracked(tmp_path / "run", status=status)
        assert json.loads((tmp_path / "run").read_text())["end"] == end


def scalar(number: int) -> Scalar:
    return Scalar("loss", 1.0, number, 0.0)


def test_what_is_put_before_the_end_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scalars, "EVERY", 0.0)
    monkeypatch.setattr(scalars, "AHEAD", 2)
    one = Backlog()
    batches = one.batches()
    for number in range(4):
        one.put(scalar(number))
    assert next(batches) == [scalar(0), scalar(1)]
    for number in range(4, 6):
        one.put(scalar(number))
    one.close()  # the queue is full, and the writer does not wait
    assert list(batches) == [[scalar(4), scalar(5)]] and list(one.batches()) == []
    one.report("W&B")
    assert capsys.readouterr().err.startswith("warning: W&B lacks 2 values")


def test_a_replay_waits_for_the_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars, "AHEAD", 2)
    one, found = Backlog(waits=True), list[Scalar]()
    writer = threading.Thread(target=lambda: [found.extend(batch) for batch in one.batches()])
    writer.start()
    for number in range(10):
        one.put(scalar(number))
    one.close()
    writer.join(240)
    assert found == [scalar(number) for number in range(10)]
    one.abandon()
    for number in range(10):
        one.put(scalar(number))  # does not wait


def test_a_client_that_fails_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Reported(time=2.0, step=5, total_time=1.0, metrics={"broken": 3.0})
    tracked(tmp_path / "run", broken)
    tracked(tmp_path / "run", broken, code="import os; os._exit(9)")
    _, first, second = capsys.readouterr().err.splitlines()
    assert "no quota" in first and "status 9" in second


def test_a_client_that_hangs_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tracker, "LIMIT", 0.1)
    tracked(tmp_path / "run", code="import signal; signal.pause()")
    assert "did not end within 0.1 s" in capsys.readouterr().err


def test_a_client_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidSettings, match="--mlflow needs MLflow's client") as caught:
        Exports(trackers={"mlflow": "mine"})
    assert "geomx-cli[mlflow]" in caught.value.hint
