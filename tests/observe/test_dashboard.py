"""The live page: its state from events, access control, and a real job in a real browser."""

import contextlib
import http.client
import json
import math
import random
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from browser import Browser
from cluster import until
from desk import Desk
from idx import write_data
from plans import planned

from geomx_cli.core.errors import CheckFailed, InvalidSettings
from geomx_cli.core.events import parse
from geomx_cli.jobs.actions.logs import Line, LogReader
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.store.registry import KnownJob
from geomx_cli.observe.dashboard.comparison import Comparison
from geomx_cli.observe.dashboard.curves import MOST, DownsampledSeries, Flow, MeasuredSeries
from geomx_cli.observe.dashboard.job_model import JobModel, LogSearch
from geomx_cli.observe.dashboard.job_rows import labels
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
    mean = DownsampledSeries()
    for seconds, value, source in ((0.1, 3.0, "a"), (0.2, 5.0, "b"), (0.8, 1.0, "a"), (0.4, 9.0, "a")):
        mean.add(seconds, value, source)
    assert mean.points() == [(0.8, 3.0)], "the mean of the newest of each"


def test_values_of_one_source_are_those_that_were_measured() -> None:
    few = MeasuredSeries()
    for seconds, value in ((1.3, 0.7), (1.1, 0.5), (1.2, 0.9)):
        few.add(seconds, value)
    assert few.points() == [(1.1, 0.5), (1.2, 0.9), (1.3, 0.7)], "all of them, and the newest is the last"
    many, rng = MeasuredSeries(), random.Random(1)
    values = [(number / 7, round(rng.random(), 3)) for number in range(20000)]
    for number, (seconds, value) in enumerate(values):
        many.add(seconds, value)
        assert number % 500 or many.points()[-1][1] == value
    points = many.points()
    assert MOST / 4 <= len(points) <= MOST
    assert points[0][1] == values[0][1] and points[-1][1] == values[-1][1]
    assert {value for _, value in points} <= {value for _, value in values}, "no means"
    for extreme in (min, max):
        assert extreme(value for _, value in points) == extreme(value for _, value in values)


def telemetry(seconds: float, **fields: Any) -> dict[str, Any]:
    counted = {"lan": [0, 0], "wan": [0, 0], "peers": {}}
    return {"time": BEGAN + seconds, "event": "telemetry", "bytes": counted, **fields}


def take(model: JobModel, process: str, fields: dict[str, Any]) -> None:
    """Process an event as from an event log; invalid ones are ignored."""
    with contextlib.suppress(ValueError):
        if (event := parse(fields)) is not None:
            model.take(process, event)


def test_events_are_folded() -> None:
    model = JobModel(planned(), BEGAN, lambda: BEGAN + 6)
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
    assert known["curves"]["accuracy"] == {"accuracy": [[2.0, 0.6]]}, "when its round was over"
    assert known["curves"]["loss"] == {"A/worker:0": [[2.0, 2.0]]}
    assert known["curves"]["wan"] == {"A": [[2.5, 3001.0], [3.5, 2000.0]]}, "all of the first, then spread over time"
    assert known["links"] == [{"from": "A", "to": "central", "bytes": 5000, "bytes_per_s": 2000}]
    (message,) = known["messages"]
    assert message["process"] == "B/worker:1" and "disk; buy one" in message["text"] and "\x1b" not in message["text"]
    assert known["seconds"] == 5.0 and known["encoded"] == {"compress": [800, 4], "compress-lan": [0, 0]}


def test_all_bytes_are_shown_after_a_gap_too() -> None:
    model = JobModel(planned(), BEGAN)
    for second, sent in ((2, 1000), (3000, 5000)):
        counted = {"lan": [0, 0], "wan": [sent, 0], "peers": {ROOT: [sent, 0]}}
        take(model, "A/server:0", telemetry(second, state="serving", bytes=counted))
    assert model.snapshot()["axes"]["bytes"][-1][1] == 5000


def test_metrics_of_scripts() -> None:
    model = JobModel(planned(), BEGAN)
    usual = {"event": "reported", "total_time": 1.0, "live": True}
    for step in range(1000):
        values = {"loss": 2.0, "metrics": {"norm": float(step), f"m{step}": 1.0}}
        take(model, "B/worker:0", {**usual, "time": BEGAN + step / 1000, "step": step, **values})
    take(model, "B/worker:0", {**usual, "time": BEGAN + 2, "step": 999, "accuracy": 0.5, "metrics": {"x": math.nan}})
    known = model.snapshot()
    assert known["curves"]["accuracy"] == {"accuracy": [(2.0, 0.5)]}
    assert {value for _, value in known["curves"]["loss"]["B/worker:0"]} == {2.0} and not known["averaged"]
    points = known["metrics"]["norm"]["B/worker:0"]
    assert points[0] == (0.0, 0.0) and points[-1] == (0.999, 999.0) and 100 < len(points) <= MOST, "as measured"
    assert known["axes"]["steps"]["B/worker:0"][-2:] == [(0.999, 999.0), (2.0, 999.0)]
    assert len(known["metrics"]) == 16 and "x" not in known["metrics"]


def test_the_accuracy_is_that_of_the_lowest_rank_that_reports_any() -> None:
    model = JobModel(planned(), BEGAN)
    usual = {"event": "reported", "total_time": 1.0, "live": True}
    for second, process, accuracy in (
        (1, "B/worker:1", 0.9), (2, "B/worker:0", 0.8), (3, "B/worker:1", 0.95), (4, "A/worker:1", 0.25),
        (5, "B/worker:0", 0.85), (6, "B/worker:1", 0.99), (7, "A/worker:1", 0.5),
    ):  # fmt: skip
        take(model, process, {**usual, "time": BEGAN + second, "step": second, "accuracy": accuracy})
    curve = [(4.0, 0.25), (7.0, 0.5)]
    assert model.snapshot()["curves"]["accuracy"] == {"accuracy": curve}, "not that of the one with most"
    assert model.overall()["curves"]["accuracy"] == {"all workers": curve}
    assert model.progress.accuracy == 0.5


def test_an_accuracy_is_shown_when_its_round_was_over() -> None:
    model = JobModel(planned(), BEGAN)
    for second in range(1, 30):
        take(model, "A/worker:0", telemetry(second, state="training", round=2 * second))
    take(model, "A/worker:0", {"time": BEGAN + 30, "event": "evaluation", "accuracy": 0.6, "round": 20})
    take(model, "A/worker:0", {"time": BEGAN + 31, "event": "finished", "rounds": 60, "accuracy": 0.7})
    assert model.snapshot()["curves"]["accuracy"] == {"accuracy": [(10.0, 0.6), (31.0, 0.7)]}


def test_many_workers_are_shown_by_party() -> None:
    model = JobModel(planned(workers=8), BEGAN)
    for rank in range(8):
        take(model, f"A/worker:{rank}", telemetry(1, state="training", samples_per_s=10.0 * rank, loss=1.0))
    assert model.snapshot()["curves"]["speed"] == {"party A": [(1.5, 280.0)]}, "all of them together"
    assert model.snapshot()["curves"]["loss"] == {"party A": [(1.0, 1.0)]}, "their mean"


def test_a_loss_that_is_no_number_is_shown_as_such() -> None:
    model = JobModel(planned(), BEGAN)
    for second, loss in ((1, 2.0), (2, float("nan")), (3, float("nan"))):
        take(model, "A/worker:0", telemetry(second, state="training", loss=loss))
    take(model, "A/worker:0", telemetry(float("inf"), state="training", loss=1.0))
    known = json.loads(json.dumps(model.snapshot(), allow_nan=False))
    row = next(row for row in known["processes"] if row["name"] == "A/worker:0")
    assert row["loss"] is None and known["curves"]["loss"] == {"A/worker:0": [[1.0, 2.0]]} and known["seconds"] == 3.0
    assert known["not_finite"] == {"curves": ["loss"], "metrics": []}


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


def test_the_last_loss_is_drawn_though_its_worker_has_finished() -> None:
    model = JobModel(planned(), BEGAN)
    take(model, "A/worker:0", telemetry(1, state="training", loss=2.0, round=5, samples_per_s=50.0))
    take(model, "A/worker:0", {"time": BEGAN + 1.5, "event": "finished", "rounds": 9})
    for second in (2, 3):
        take(model, "A/worker:0", telemetry(second, state="finished", loss=0.5, round=9, samples_per_s=50.0))
    known = model.snapshot()
    assert known["curves"]["loss"]["A/worker:0"] == [(1.0, 2.0), (2.0, 0.5)], "as in the table, and once"
    assert known["axes"]["rounds"]["A/worker:0"][-1] == (2.0, 9.0)
    assert known["curves"]["speed"]["A/worker:0"] == [(1.0, 50.0)]


def test_a_finished_worker_has_no_rate() -> None:
    model = JobModel(planned(), BEGAN, lambda: BEGAN + 3)
    for name in ("A/worker:0", "B/worker:1"):
        take(model, name, telemetry(1, state="training", samples_per_s=50.0))
    take(model, "B/worker:1", {"time": BEGAN + 2, "event": "finished", "rounds": 4})
    known = model.snapshot()
    rates = {row["name"]: row["samples_per_s"] for row in known["processes"] if "samples_per_s" in row}
    assert rates == {"A/worker:0": 50.0} and known["totals"]["samples_per_s"] == 50.0
    assert {party["name"]: party["samples_per_s"] for party in known["parties"]} == {"central": 0, "A": 50, "B": 0}
    assert model.progress.samples_per_s == 50.0


def test_a_flow_has_all_that_was_moved_in_few_points() -> None:
    flow = Flow()
    for second in range(5000):
        flow.add(float(second), second + 1.0, 10.0)
    points = flow.points()
    assert MOST / 4 <= len(points) <= MOST and {value for _, value in points} == {10.0}
    flow = Flow()
    flow.add(0.0, 1e6, 1e6)
    assert len(flow.points()) <= MOST and abs(flow.points()[5][1] - 1.0) < 1e-6


def refuse(_: object) -> dict[str, Any]:
    """An answer that is an error."""
    raise CheckFailed("the disk is gone", "find it")


def test_the_state_of_a_huge_job_is_small() -> None:
    for cluster, parties in (({"workers": 1000}, 3), ({"parties": 300, "workers": 7}, 101)):
        plan = planned(**cluster)
        model = JobModel(plan, BEGAN)
        workers = [process.name for process in plan.processes if process.global_rank is not None]
        for index, name in enumerate(workers):
            for second in range(1000 if index < 12 else 2):
                event = parse(telemetry(second, state="training", round=second, loss=1 / (second + 1), waiting=0.123))
                assert event is not None
                model.take(name, event)
        state, rows = model.snapshot(), model.rows("A", 0)
        assert len(workers) >= 2000 and state["totals"]["processes"] == len(plan.processes)
        assert len(json.dumps(state)) < 200_000 and state["processes"] == []
        assert len(state["parties"]) == parties and sum(one["count"] for one in state["parties"]) == len(plan.processes)
        assert len(rows["rows"]) == min(100, rows["count"])
        failed = model.snapshot(over=True, failed_first=workers[0])
        assert [one["name"] for one in failed["processes"]] == [workers[0]], "of many only those that failed"


def test_a_log_is_searched_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Reader:
        """5000 lines."""

        def __init__(self, job: object, chosen: list[Any], note: object, hosts: object) -> None:
            assert hosts is known
            self.name, self.problems = chosen[0].name, {"A": "it is gone"}

        def read(self, lines: int) -> Iterator[Line]:
            asked.append(lines)
            with pytest.raises(CheckFailed, match="already running"):
                search.find("", "")
            return (Line(self.name, f"Line {number} {'x' * 5000}") for number in range(5000))

        def close(self) -> None:
            """Nothing is open."""

    monkeypatch.setattr("geomx_cli.observe.dashboard.job_model.LogReader", Reader)
    known: dict[str, Any] = {"A": SimpleNamespace(close=lambda: closed.append("A"))}
    opening, closed = iter([known]), list[str]()
    search = LogSearch(SimpleNamespace(plan=planned(), open_hosts=lambda: next(opening)))  # type: ignore[arg-type]
    found = search.find("A/worker:0", "line 4")
    assert (found["searched"], found["matched"], len(found["lines"])) == (5000, 1111, 500)
    assert found["lines"][-1][0] == "A/worker:0" and len(found["lines"][-1][1]) == 1000
    assert found["problems"] == ["host A: it is gone"] and asked == [20000]
    search.find("", "")
    assert asked[1] * len(planned().processes) <= 20000
    with pytest.raises(InvalidSettings, match="no process 'x'"):
        search.find("x", "")
    assert not closed, "the connections are used again"
    search.close()
    assert closed == ["A"]


def test_only_known_jobs_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    class Events:
        """Two events."""

        over = True

        def __init__(self, job: KnownJob, on_event: Any, note: Any) -> None:
            for second in (1, 2):
                on_event("A/worker:0", parse(telemetry(second, state="training", loss=2.0, round=second)))
            self.job = job.id
            opened.append(job.id)

        def close(self) -> None:
            opened.remove(self.job)

    opened: list[str] = []
    monkeypatch.setattr("geomx_cli.observe.dashboard.comparison.EventReader", Events)
    jobs = [SimpleNamespace(id=f"j{index}", plan=planned(), started=BEGAN, what="cnn") for index in range(60)]
    with contextlib.closing(Comparison("j0", lambda: jobs)) as comparison:  # type: ignore[arg-type, return-value]
        assert comparison.overlays(["j1"]) == {}, "not offered"
        offered = [one["job"] for one in comparison.choices()]
        assert len(offered) == 50 and "j0" not in offered
        found = comparison.overlays(["j1", "j0", "../x", "j1", *offered])
        assert list(found) == offered[:4] == opened
        assert found["j1"]["curves"]["loss"] == {"all workers": [(1.5, 2.0), (2.0, 2.0)]} and not found["j1"]["reading"]
        for _ in range(2):  # two windows
            assert list(comparison.overlays(["j1"])) == ["j1"] and list(comparison.overlays(["j5"])) == ["j5"]
        assert opened == [*offered[:4], "j5"], "each is opened once"
        comparison.overlays(offered[10:14])
        assert len(opened) == 8 and "j1" in opened and offered[1] not in opened, "the longest unasked goes"
        monkeypatch.setattr("geomx_cli.observe.dashboard.comparison.UNASKED", -1.0)
        assert list(comparison.overlays(["j1"])) == ["j1"] and opened == ["j1"], "others are read no longer"
    assert not opened


def test_compared_jobs_have_labels_that_tell_them_apart() -> None:
    def job(name: str, **options: Any) -> SimpleNamespace:
        known = {"algo": "hfa", "lr": 0.1, "compress": "", "data_dir": name, **options}
        return SimpleNamespace(id=name, plan=SimpleNamespace(spec=SimpleNamespace(options=known, script=())))

    jobs = [job("a", seed=1), job("b", seed=2), job("c", compress="fp16", algo="fsa", seed=2)]
    assert labels({one.id: one for one in jobs}) == {  # type: ignore[misc]
        "a": "hfa, no compress, seed 1", "b": "hfa, no compress, seed 2", "c": "fsa, compress fp16, seed 2",
    }  # fmt: skip
    assert labels({one.id: one for one in jobs[:1]}) == {"a": "hfa"}  # type: ignore[misc]
    limits = [job("a", time_limit=40.0), job("b", time_limit=2.5)]
    assert list(labels({one.id: one for one in limits}).values()) == [  # type: ignore[misc]
        "hfa, time-limit 40", "hfa, time-limit 2.5",
    ]  # fmt: skip


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server({"/data": lambda given: {"answer": 42, **given}, "/log": refuse}, 0, TOKEN)
    yield made
    made.close()


def ask(server: Server, path: str, host: str = "") -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=240)
    connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{server.port}"})
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_nothing_without_the_token(server: Server) -> None:
    status, body, _ = ask(server, f"/data?token={TOKEN}&with=%ff{'x' * 3000}")
    known = json.loads(body)
    assert status == 200 and known["answer"] == 42 and len(known["with"]) == 200, "parameters are bounded"
    assert ask(server, f"/data?token={TOKEN}" + "&a=b" * 20)[0] == 400
    assert ask(server, f"/log?token={TOKEN}")[:2] == (400, b"400 Bad Request: the disk is gone; find it\n")
    wrong = ("", TOKEN[:-1], f"{TOKEN}2")
    for path in ("/", "/data", "/log", "/?token=x", *(f"/data?token={token}" for token in wrong)):
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
    assert ask(server, "/static/map.js")[0] == 200 and ask(server, "/static/uplot/uPlot.min.css")[0] == 200
    for name in ("../server.py", "..%2fserver.py", "page.html", "uplot/LICENSE", "none", "/etc/passwd"):
        assert ask(server, f"/static/{name}")[0] == 404, name
    assert ask(server, f"/none?token={TOKEN}")[0] == 404


def test_it_listens_on_loopback_alone_and_takes_the_port_again(server: Server, tmp_path: Path) -> None:
    assert server._http.server_address[0] == "127.0.0.1"
    with pytest.raises(CheckFailed, match=f"cannot listen on 127.0.0.1:{server.port}"):
        started({}, server.port, 0, "t")
    server.remember(tmp_path)
    assert (tmp_path / "dashboard.json").stat().st_mode & 0o777 == 0o600
    assert remembered(tmp_path) == (server.port, TOKEN)
    other = started({}, 0, server.port, TOKEN)
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
    assert url.startswith("http://127.0.0.1:"), dashboard.communicate(timeout=240)
    return url


TEXT = "document.getElementById('summary').textContent"
RATES = "[...document.querySelectorAll('#map .rate')].map(text => text.textContent)"
ROWS = "[...document.querySelectorAll('#processes .process')]"
STATES = f"{ROWS}.map(row => row.cells[2].textContent)"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One for all tests of this module."""
    with Browser() as started:
        yield started


@pytest.fixture
def browser(chromium: Browser) -> Browser:
    """Without complaints of earlier tests."""
    chromium.open("about:blank")
    chromium.complaints.clear()
    chromium.resize(1280)
    return chromium


LOG = "document.getElementById('log-lines').textContent"


def test_a_real_job_in_a_browser(desk: Desk, tmp_path: Path, browser: Browser) -> None:
    """Thirteen processes, during training, after their end, and with a restarted dashboard. The round trip keeps them
    from taking the cores from the browser.
    """
    data = write_data(tmp_path / "data", 2048, 64)
    words = ["--local", "--network", "linear", "--data-dir", str(data), "--batch-size", "16", "--epochs", "100000"]
    words += ["--time-limit", "180s", "--wan", "1gbit,100ms"]
    launch = desk.start("launch", *words, "--algo", "hfa", "--k1", "2", "--k2", "2", "--eval-every", "20", "--json")
    until(lambda: list(desk.state.glob("geomx/jobs/*/plan.json")) or launch.poll() is not None)
    dashboard = desk.start("dashboard")
    url = page_of(dashboard)
    browser.open(url)
    browser.wait_for(f"{ROWS}.length === 13")
    browser.wait_for(f"{TEXT}.includes('linear by hfa · running') && {TEXT}.includes('samples/s')")
    browser.wait_for(f"{TEXT}.includes('test accuracy')")
    network = browser.value("document.getElementById('network').textContent")
    assert network == "emulated network: each party 1000 Mbit/s, round trip 100 ms"
    browser.wait_for("document.querySelectorAll('.chart canvas').length === 5")
    browser.wait_for("document.querySelectorAll('#hosts meter').length === 2")
    browser.wait_for(f"{RATES}.some(text => /[1-9].* [kM]B\\/s/.test(text))")
    browser.screenshot(tmp_path / "running.png")
    browser.value("document.getElementById('log-search').value = 'MEMBERS have'")
    browser.value("document.getElementById('log').open = true")
    browser.wait_for(f"{LOG}.includes('A/scheduler:0') && !!document.querySelector('#log-lines mark')")
    assert desk.geomx("stop").returncode == 0
    assert launch.wait(240) == 75
    browser.wait_for(f"{TEXT}.includes('· stopped ·')")
    browser.wait_for(f"{STATES}.every(state => ['finished', 'failed', 'ended', 'stopped'].includes(state))")
    dashboard.terminate()
    assert dashboard.wait(240) == 0
    browser.wait_for("!document.getElementById('trouble').hidden")
    assert "no connection to geomx dashboard" in browser.value("document.getElementById('trouble').textContent")
    lost = [text for text in browser.complaints if "CONNECTION_REFUSED" in text or "CONNECTION_RESET" in text]
    assert browser.complaints == lost, "nothing but that it was gone"
    again = desk.start("dashboard")
    assert page_of(again) == url, "the same address, so that the page finds it"
    browser.wait_for("document.getElementById('trouble').hidden")
    browser.complaints.clear()
    browser.open(url)
    browser.wait_for(f"{TEXT}.includes('· stopped ·') && {TEXT}.includes('test accuracy')")
    browser.screenshot(tmp_path / "over.png")
    assert not browser.complaints
    for name in ("running", "over"):
        assert (tmp_path / f"{name}.png").stat().st_size > 30_000
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(url.partition("?")[0], timeout=240)
    again.terminate()
    assert again.wait(240) == 0


PLACED = """(() => {
  const boxes = [...document.querySelectorAll('#map .party')].map(box => box.getBoundingClientRect());
  const wires = [...document.querySelectorAll('#map .wire')].flatMap(wire => {
    const points = [...wire.points], to = wire.getScreenCTM();
    return points.slice(1).map((end, index) => {
      const [a, b] = [points[index].matrixTransform(to), end.matrixTransform(to)];
      return new DOMRect(Math.min(a.x, b.x), Math.min(a.y, b.y), Math.abs(a.x - b.x), Math.abs(a.y - b.y));
    });
  });
  const rates = [...document.querySelectorAll('#map .rate')].map(text => text.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  return rates.length && wires.length && rates.every((rate, index) =>
    ![...boxes, ...wires, ...rates.slice(0, index)].some(other => meet(rate, other)));
})()"""
HOSTILE = "=<img src=x onerror=alert(1)>"
LONG = "a-data-centre-with-a-name-that-is-longer-than-any-column"


def page_answers(model: JobModel) -> dict[str, Any]:
    """What the dashboard of a job in a model would answer."""
    names = [*list(model.progress.rows)[:90], HOSTILE]
    options = [{"name": "lr", "value": "0.1", "default": False}, {"name": "k1", "value": "20", "default": True}]
    job = {"job": "job-1", "what": "cnn by hfa", "script": True}
    state = {"state": "running", "over": False, "cause": ""}
    metrics = {"perplexity": {HOSTILE: [[1, 9.0], [5, 8.0]]}}

    def long(found: Any) -> Any:
        """One party has a long name."""
        return json.loads(json.dumps(found).replace('"F/', f'"{LONG}/').replace('"F"', f'"{LONG}"'))

    def data(given: Any) -> dict[str, Any]:
        other = {"what": "cnn by fsa", "problem": "", "reading": True, **model.overall()}
        others = {name: other for name in given.get("with", "").split(",") if name}
        known = {**job, **state, **model.snapshot(), "metrics": metrics, "overall": model.overall(), "others": others}
        return long({**known, "labels": {"job-1": "hfa, seed 1", "job-2": "hfa, seed 2"}})

    return {
        "/data": data,
        "/job": lambda _: {**job, "network": "", "options": options, "hosts": ["A"], "processes": long(names)},
        "/rows": lambda given: model.rows(given["party"], int(given["first"])),
        "/jobs": lambda _: {"jobs": [{"job": "job-2", "what": "cnn by fsa", "started": BEGAN}]},
        "/log": lambda given: {"lines": [["A", HOSTILE]], "searched": 1, "matched": 1, "problems": []},
    }


def test_the_page_at_all_widths(browser: Browser) -> None:
    """2000 workers, and then seven parties with traffic: nothing overflows, overlaps or is left out for a reader."""
    models = [JobModel(planned(workers=1000), BEGAN), JobModel(planned(parties=6, workers=1), BEGAN)]
    answers = page_answers(models[0])
    server = Server(answers, 0, TOKEN)
    browser.open(server.url)
    browser.wait_for("document.querySelectorAll('#processes tr').length === 4")
    assert "No event" in browser.value("document.querySelector('#loss .empty').textContent")
    browser.value("document.querySelectorAll('#processes button')[1].click()")
    browser.wait_for(f"{ROWS}.length === 100")
    browser.value("[...document.querySelectorAll('.pages button')].at(-1).click()")
    browser.wait_for(f"{ROWS}[0].cells[0].textContent === 'A/worker:98'")
    for second in (1, 2, 3):
        for party in "ABCDEF":
            counted = {"lan": [0, 0], "wan": [0, 0], "peers": {ROOT: [second * 10**8, 1]}}
            training = {"state": "training", "loss": 1 / second, "round": second, "bytes": counted}
            worker = f"{party}/worker:{'ABCDEF'.index(party)}"
            take(models[1], worker, {"time": BEGAN, "event": "state", "state": "training"})
            take(models[1], worker, telemetry(second, **training))
    answers.update(page_answers(models[1]))
    browser.open(server.url)
    browser.wait_for(f"{TEXT}.includes('running') && document.querySelectorAll('.chart canvas').length === 3")
    browser.value("document.querySelectorAll('details').forEach(one => one.open = true)")
    browser.value("document.getElementById('smoothing').value = 0.5")
    browser.value("document.querySelector('#axis [value=rounds]').click()")
    browser.wait_for(f"{LOG}.includes('<img')")
    for width in (390, 1280, 2560):
        browser.resize(width)
        browser.wait_for(f"document.querySelector('#map svg').clientWidth < {width} && {PLACED}")
        # The charts follow the window's width in a later frame.
        browser.wait_for("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    browser.wait_for("document.querySelector('#loss .chart canvas').clientHeight > 240")  # in wide windows
    for dark in (False, True):
        browser.resize(1280, dark=dark)
        assert browser.violations() == []
    browser.value("const url = URL.createObjectURL")
    browser.value("URL.createObjectURL = blob => url.call(URL, window.saved = blob); 0")
    assert "perplexity over rounds" in browser.value("document.querySelector('#metric-0 .chart').ariaLabel")
    browser.value("document.querySelector('#axis [value=time]').click()")
    browser.value("document.querySelector('#metric-0 button').click()")
    assert browser.value("saved.text()") == f"time,'{HOSTILE}\r\n1,9\r\n5,8\r\n"
    assert browser.value("document.getElementById('steps').hidden"), "no script reports steps"
    assert "G global server" in browser.value("document.querySelector('#map .key').textContent")
    browser.value("document.querySelector('#loss button:nth-child(2)').click()")
    browser.wait_for("saved.type === 'image/png'")
    browser.wait_for("!!document.querySelector('#jobs input')")
    browser.value("document.querySelector('#jobs input').click()")
    browser.wait_for("document.querySelector('#loss .legend').textContent.includes('job-2: hfa, seed 2')")
    assert "job-1 (this job): hfa, seed 1" in browser.value("document.querySelector('#loss .legend').textContent")
    assert not browser.complaints
    server.close()


def test_a_log_that_is_chosen_while_another_is_read(browser: Browser) -> None:
    answers, asked, may_answer = page_answers(JobModel(planned(), BEGAN)), list[str](), threading.Event()

    def log(given: Mapping[str, str]) -> dict[str, Any]:
        asked.append(given.get("process", ""))
        may_answer.wait(240)
        return {"lines": [["", f"of {asked[-1]}"]], "searched": 1, "matched": 1, "problems": []}

    answers["/log"] = log
    with contextlib.closing(Server(answers, 0, TOKEN)) as server:
        browser.open(server.url)
        browser.wait_for("document.title === 'geomx job-1'")
        browser.value("document.getElementById('log').open = true")
        until(lambda: asked)
        browser.value(
            "(list => { list.value = 'A/worker:0'; list.dispatchEvent(new Event('change')); })"
            "(document.getElementById('log-process'))"
        )
        may_answer.set()
        browser.wait_for(f"{LOG}.includes('of A/worker:0')")
        assert asked == ["", "A/worker:0"] and not browser.complaints


def test_a_dashboard_that_does_not_answer_is_noticed(browser: Browser) -> None:
    """As when the connection to another machine's loopback hangs. The page continues once there are answers."""
    answers, may_answer = page_answers(JobModel(planned(), BEGAN)), threading.Event()
    data = answers["/data"]

    def late(given: Mapping[str, str]) -> Any:
        may_answer.wait(240)
        return data(given)

    with contextlib.closing(Server(answers, 0, TOKEN)) as server:
        browser.open(server.url)
        browser.wait_for("document.title === 'geomx job-1'")
        browser.value("const limit = AbortSignal.timeout.bind(AbortSignal)")
        browser.value("AbortSignal.timeout = milliseconds => limit(milliseconds / 100); 0")
        answers["/data"] = late
        browser.wait_for("!document.getElementById('trouble').hidden")
        may_answer.set()
        browser.wait_for("document.getElementById('trouble').hidden")


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


def test_a_host_whose_agent_starts_late_is_followed_too(desk: Desk, tmp_path: Path) -> None:
    launch = desk.launch(story={"nobody": "forever"})
    assert launch.finish() == 0
    job = KnownJob.at(launch.directory)
    assert job is not None
    late = [launch.directory / name for name in ("events/A-worker-0.jsonl", "hosts/A/agent-state.json")]
    for number, path in enumerate(late):
        path.rename(tmp_path / f"{number}")
    ended = (launch.directory / "state.json").read_bytes()
    job_state.follow(launch.directory)  # it runs
    notes, read = list[str](), Counter[str]()
    reader = LogReader(job, job.plan.processes, notes.append, events=True)
    following = threading.Thread(target=lambda: read.update(line.process for line in reader.follow()), daemon=True)
    following.start()
    until(lambda: read["central/worker:0"] and read["A/worker:1"])
    following.join(1.0)  # the agent is looked for again meanwhile
    assert following.is_alive() and not read["A/worker:0"]
    for number, path in enumerate(late):
        (tmp_path / f"{number}").rename(path)
    following.join(240)
    assert not following.is_alive() and read["A/worker:0"] and not reader.problems and not notes
    (launch.directory / "state.json").write_bytes(ended)
    reader.close()


def test_a_failure_is_shown(desk: Desk, browser: Browser) -> None:
    launch = desk.launch(story={"A/worker:1": "raise"})
    assert launch.finish() == 1
    dashboard = desk.start("dashboard", launch.id)
    browser.open(page_of(dashboard))
    browser.wait_for(f"{TEXT}.includes('· failed ·')")
    browser.wait_for(f"{STATES}.includes('failed') && {STATES}.includes('stopped')")
    assert not browser.complaints
    dashboard.terminate()
