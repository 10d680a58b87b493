"""The live page: its state from events, access control, and a real job in a real browser."""

import contextlib
import http.client
import json
import random
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser
from desk import Desk
from idx import write_data
from plans import planned

from geomx_cli.core.errors import CheckFailed
from geomx_cli.core.events import parse
from geomx_cli.jobs.actions.logs import LogReader
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.downsampled_series import MOST, DownsampledSeries, Flow
from geomx_cli.observe.dashboard.job_model import JobModel
from geomx_cli.observe.dashboard.server import Server, remembered, started

BEGAN = 1000.0
TOKEN = "secret-token-of-more-than-24"
ROOT = "central/global_server:0"


def test_a_curve_has_few_points_and_does_not_care_for_the_order() -> None:
    values = [(float(second), float(second % 7), f"w{second % 3}") for second in range(5000)]
    curve, shuffled = DownsampledSeries(), DownsampledSeries()
    for value in values:
        curve.add(*value)
    random.Random(3).shuffle(values)
    for value in values:
        shuffled.add(*value)
    points = curve.points()
    assert MOST / 2 <= len(points) <= MOST and points == shuffled.points()
    assert [seconds for seconds, _ in points] == sorted(seconds for seconds, _ in points)
    assert all(2.0 < value < 4.0 for _, value in points[:-1]), "means"
    summed = DownsampledSeries(summed=True)
    for source in ("a", "b"):
        summed.add(0.2, 3.0, source)
        summed.add(0.7, 5.0, source)
    assert summed.points() == [(0.5, 8.0)], "the sum over sources of their means"


def telemetry(seconds: float, **fields: Any) -> dict[str, Any]:
    counted = {"lan": [0, 0], "wan": [0, 0], "peers": {}}
    return {"time": BEGAN + seconds, "event": "telemetry", "bytes": counted, **fields}


def take(model: JobModel, process: str, fields: dict[str, Any]) -> None:
    """Process an event as from an event log; invalid ones are ignored."""
    with contextlib.suppress(ValueError):
        if (event := parse(fields)) is not None:
            model.take(process, event)


def test_events_are_folded() -> None:
    model = JobModel(planned(), BEGAN)
    take(model, "A/worker:0", {"time": BEGAN + 1, "event": "state", "state": "training"})
    training = {"state": "training", "round": 4, "samples_per_s": 50.0, "loss": 2.0, "waiting": 0.25, "progress": 0.5}
    take(model, "A/worker:0", telemetry(2, **training))
    take(model, "A/worker:0", {"time": BEGAN + 3, "event": "evaluation", "accuracy": 0.6, "round": 3})
    for second, sent in ((2, 1000), (4, 5000)):
        counted = {"lan": [0, 0], "wan": [sent, 10], "peers": {ROOT: [sent, 10], "an unknown peer": [1, 1]}}
        counted["encoded"] = [800, 4]
        take(model, "A/server:0", telemetry(second, state="serving", bytes=counted))
    take(model, "B/worker:1", {"time": BEGAN + 5, "event": "failed", "message": "no \x1b[31mdisk", "hint": "buy one"})
    take(model, "nobody", telemetry(1))
    huge = {"lan": [0, 0], "wan": [1, 1], "peers": {ROOT: [10**400, 1]}}
    for broken in (
        {}, {"time": "x", "event": "state"}, {"time": 1, "event": "telemetry", "bytes": 3}, {"time": 2},
        {"time": 1e300, "event": "state", "state": "odd"}, telemetry(1, bytes=huge),
    ):  # fmt: skip
        take(model, "A/worker:1", broken)
    known = json.loads(json.dumps(model.snapshot()))
    rows = {row["name"]: row for row in known["processes"]}
    assert rows["A/worker:0"]["round"] == 4 and rows["A/worker:0"]["waiting"] == 0.25 and rows["A/worker:0"]["trains"]
    assert rows["B/worker:1"]["state"] == "failed" and rows["A/server:0"]["wan"] == [5000, 10]
    assert known["curves"]["accuracy"] == {"accuracy": [[3.5, 0.6]]}
    assert known["curves"]["loss"] == {"A/worker:0": [[2.5, 2.0]]}
    assert known["curves"]["wan"] == {"A": [[2.5, 2000.0], [3.5, 2000.0]]}, "spread over the time between two counts"
    assert known["links"] == [{"from": "A", "to": "central", "bytes": 5000, "bytes_per_s": 2000}]
    (message,) = known["messages"]
    assert message["process"] == "B/worker:1" and "disk; buy one" in message["text"] and "\x1b" not in message["text"]
    assert known["seconds"] == 5.0 and known["encoded"] == {"compress": [800, 4], "compress-lan": [0, 0]}


def test_many_workers_are_shown_by_party() -> None:
    model = JobModel(planned(workers=8), BEGAN)
    for rank in range(8):
        take(model, f"A/worker:{rank}", telemetry(1, state="training", samples_per_s=10.0 * rank, loss=1.0))
    assert model.snapshot()["curves"]["speed"] == {"party A": [(1.5, 280.0)]}, "all of them together"
    assert model.snapshot()["curves"]["loss"] == {"party A": [(1.5, 1.0)]}, "their mean"


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    model = JobModel(planned(), BEGAN)
    for second, loss in ((1, 2.0), (2, float("nan")), (3, float("nan"))):
        take(model, "A/worker:0", telemetry(second, state="training", loss=loss))
    take(model, "A/worker:0", telemetry(float("inf"), state="training", loss=1.0))
    known = json.loads(json.dumps(model.snapshot(), allow_nan=False))
    row = next(row for row in known["processes"] if row["name"] == "A/worker:0")
    assert row["loss"] is None and known["curves"]["loss"] == {"A/worker:0": [[1.5, 2.0]]} and known["seconds"] == 3.0


def test_who_says_nothing_is_lost_and_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = JobModel(planned(), BEGAN)
    for second, sent in ((1, 0), (2, 5000)):
        counted = {"lan": [0, 0], "wan": [sent, 0], "peers": {ROOT: [sent, 0]}}
        take(model, "A/server:0", telemetry(second, state="serving", bytes=counted))
    assert model.snapshot()["links"][0]["bytes_per_s"] == 5000
    now = time.monotonic()
    monkeypatch.setattr("geomx_cli.observe.dashboard.job_model.time.monotonic", lambda: now + 400)
    states = {row["name"]: row["state"] for row in model.snapshot()["processes"]}
    assert states["A/server:0"] == "lost" and states["A/worker:0"] == "starting"
    assert model.snapshot()["links"][0]["bytes_per_s"] == 0
    take(model, "A/server:0", telemetry(3, state="serving"))
    assert {row["name"]: row["state"] for row in model.snapshot()["processes"]}["A/server:0"] == "serving"
    assert {row["state"] for row in model.snapshot(over=True)["processes"]} == {"ended"}


def test_a_flow_has_all_that_was_moved_in_few_points() -> None:
    flow = Flow()
    for second in range(5000):
        flow.add(float(second), second + 1.0, 10.0)
    points = flow.points()
    assert MOST / 4 <= len(points) <= MOST and {value for _, value in points} == {10.0}
    flow = Flow()
    flow.add(0.0, 1e6, 1e6)
    assert len(flow.points()) <= MOST and abs(flow.points()[5][1] - 1.0) < 1e-6


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(lambda: {"answer": 42}, 0, TOKEN)
    yield made
    made.close()


def ask(server: Server, path: str, host: str = "") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.port}"})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_nothing_without_the_token(server: Server) -> None:
    assert ask(server, f"/data?token={TOKEN}")[:2] == (200, b'{"answer":42}')
    for path in ("/", "/data", "/data?token=", f"/data?token={TOKEN[:-1]}", f"/data?token={TOKEN}2", "/?token=x"):
        status, body, _ = ask(server, path)
        assert status == 403 and b"42" not in body and b"<html" not in body, path
    status, body, headers = ask(server, f"/?token={TOKEN}")
    assert status == 200 and b"<html" in body
    assert headers["Cache-Control"] == "no-store" and "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"


def test_another_name_of_this_machine_is_refused(server: Server) -> None:
    for host in ("evil.example", f"evil.example:{server.port}", "127.0.0.1", f"127.0.0.1:{server.port + 1}"):
        assert ask(server, f"/data?token={TOKEN}", host)[0] == 403, "a page elsewhere whose name leads here"
    assert ask(server, f"/data?token={TOKEN}", f"localhost:{server.port}")[0] == 200


def test_only_the_files_of_the_page(server: Server) -> None:
    assert ask(server, "/static/page.js")[0] == 200 and ask(server, "/static/uplot/uPlot.min.css")[0] == 200
    for name in ("../server.py", "..%2fserver.py", "page.html", "uplot/LICENSE", "none", "/etc/passwd"):
        assert ask(server, f"/static/{name}")[0] == 404, name
    assert ask(server, f"/none?token={TOKEN}")[0] == 404


def test_it_listens_on_loopback_alone_and_takes_the_port_again(server: Server, tmp_path: Path) -> None:
    assert server._http.server_address[0] == "127.0.0.1"
    with pytest.raises(CheckFailed, match=f"cannot listen on 127.0.0.1:{server.port}"):
        started(dict, server.port, 0, "t")
    server.remember(tmp_path)
    assert (tmp_path / "dashboard.json").stat().st_mode & 0o777 == 0o600
    assert remembered(tmp_path) == (server.port, TOKEN)
    other = started(dict, 0, server.port, TOKEN)
    assert other.port != server.port and TOKEN not in other.url, "who has the port may have heard the token"
    other.close()
    for text in ("[", '{"port": 9000, "token": ""}', '{"port": 99999, "token": "secret-token-of-more-than-24"}'):
        (tmp_path / "dashboard.json").write_text(text)
        port, token = remembered(tmp_path)
        assert port == 0 and len(token) > 24


def page_of(dashboard: "subprocess.Popen[str]") -> str:
    """The address printed by the command."""
    assert dashboard.stdout is not None
    url = dashboard.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), dashboard.communicate(timeout=90)
    return url


TEXT = "document.getElementById('summary').textContent"
RATES = "[...document.querySelectorAll('#map .rate')].map(text => text.textContent)"
STATES = "[...document.querySelectorAll('#processes tbody tr')].map(row => row.cells[2].innerText)"
ROWS = "[...document.querySelectorAll('#processes tbody tr')].map(row => row.innerText)"


def test_a_real_job_in_a_browser(desk: Desk, tmp_path: Path) -> None:
    """Twelve processes, during training, after their end, and with a restarted dashboard."""
    data = write_data(tmp_path / "data", 2048, 64)
    words = ["--local", "--network", "linear", "--data-dir", str(data), "--batch-size", "16", "--epochs", "100000"]
    words += ["--time-limit", "60s"]
    with Browser() as browser:
        launch = desk.start("launch", *words, "--algo", "hfa", "--k1", "2", "--k2", "2", "--eval-every", "20", "--json")
        end = time.monotonic() + 30
        while not list(desk.state.glob("geomx/jobs/*/plan.json")):
            assert time.monotonic() < end and launch.poll() is None
            time.sleep(0.05)
        dashboard = desk.start("dashboard")
        url = page_of(dashboard)
        browser.open(url)
        browser.wait_for(f"{ROWS}.length === 12")
        browser.wait_for(f"{TEXT}.includes('linear by hfa · running') && {TEXT}.includes('samples/s')", 60)
        browser.wait_for(f"{TEXT}.includes('test accuracy')", 60)
        browser.wait_for("document.querySelectorAll('.chart canvas').length === 5")
        browser.wait_for(f"{RATES}.some(text => /[1-9].* [kM]B\\/s/.test(text))")
        browser.screenshot(tmp_path / "running.png")
        assert desk.geomx("stop").returncode == 0
        assert launch.wait(60) == 130
        browser.wait_for(f"{TEXT}.includes('· interrupted ·')", 60)
        browser.wait_for(f"{STATES}.every(state => ['finished', 'failed', 'ended', 'stopped'].includes(state))", 60)
        dashboard.terminate()
        assert dashboard.wait(60) == 0
        browser.wait_for("!document.getElementById('trouble').hidden", 60)
        assert "no connection to geomx dashboard" in browser.value("document.getElementById('trouble').textContent")
        lost = [text for text in browser.complaints if "CONNECTION_REFUSED" in text or "CONNECTION_RESET" in text]
        assert browser.complaints == lost, "nothing but that it was gone"
        again = desk.start("dashboard")
        assert page_of(again) == url, "the same address, so that the page finds it"
        browser.wait_for("document.getElementById('trouble').hidden", 60)
        browser.complaints.clear()
        browser.open(url)
        browser.wait_for(f"{TEXT}.includes('· interrupted ·') && {TEXT}.includes('test accuracy')", 60)
        browser.screenshot(tmp_path / "over.png")
        assert not browser.complaints
    for name in ("running", "over"):
        assert (tmp_path / f"{name}.png").stat().st_size > 30_000
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.partition("?")[0], timeout=60)
    again.terminate()
    assert again.wait(60) == 0


def test_event_logs_are_read_but_for_single_rounds(desk: Desk) -> None:
    launch = desk.launch(story={"nobody": "forever"})
    assert launch.finish() == 0
    job = KnownJob.at(launch.directory)
    assert job is not None
    written = (launch.directory / "events" / "A-worker-0.jsonl").read_text().splitlines()
    assert any('"event": "round"' in line for line in written)
    reader = LogReader(job, job.plan.processes, events=True)
    read = [line.text for line in reader.read() if line.process == "A/worker:0"]
    reader.close()
    assert read == [line for line in written if '"event": "round"' not in line] and read


def test_a_failure_is_shown(desk: Desk) -> None:
    launch = desk.launch(story={"A/worker:1": "raise"})
    assert launch.finish() == 1
    dashboard = desk.start("dashboard", launch.id)
    url = page_of(dashboard)
    with Browser() as browser:
        browser.open(url)
        browser.wait_for(f"{TEXT}.includes('· failed ·')", 60)
        browser.wait_for(f"{STATES}.includes('failed') && {STATES}.includes('stopped')", 60)
        assert not browser.complaints
    dashboard.terminate()
