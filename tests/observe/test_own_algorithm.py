"""A custom algorithm: one file of a package outside geomx, from launch to the figures."""

import json
import os
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from desk import Desk
from examples import offer, shown
from idx import write_data

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings

(ALGORITHM,) = shown("Add an algorithm")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Puts a folder on the path; other tests do not see its plug-ins."""
    plugins._all.cache_clear()
    yield monkeypatch.syspath_prepend
    plugins._all.cache_clear()


def served(url: str) -> dict[str, object]:
    """The state served to a dashboard's page."""
    with urllib.request.urlopen(url.replace("/?", "/data?"), timeout=10) as answer:
        found: dict[str, object] = json.loads(answer.read())
    return found


def until_read(dashboard: "subprocess.Popen[str]") -> dict[str, object]:
    """The state of a page once all events of its finished job are read."""
    assert dashboard.stdout is not None
    url = dashboard.stdout.readline().strip()
    while (found := served(url))["curves"]["accuracy"] == {}:  # type: ignore[index]
        time.sleep(0.05)
    return found


def test_from_launch_to_figures(desk: Desk, tmp_path: Path) -> None:
    desk.environment["PYTHONPATH"] += os.pathsep + str(offer(tmp_path / "site", "damped", ALGORITHM))
    data, base = write_data(tmp_path / "data"), tmp_path / "results"
    words = ["--local", "--workers", "1", "--data-dir", str(data), "--batch-size", "16", "--epochs", "4"]
    words += ["--network", "linear", "--eval-every", "4"]
    done = desk.geomx("launch", *words, "--algo", "damped", "--damping", "0.5", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert desk.json("status", result["job"])["totals"]["rounds"] == result["rounds"] > 0
    manifest = desk.json("logs", "collect", result["job"], "--to", str(base))
    place = base / "linear" / "damped" / result["job"]
    assert not manifest["problems"] and manifest["records"] == str(place)
    assert json.loads((place / "A" / "cpu.jsonl").read_text().splitlines()[1])["damping"] == 0.5
    assert json.loads((place / "job.json").read_text())["damping"] == 0.5
    summary = desk.json("summarize", "-b", str(base), "-n", "linear", "-m", "damped")
    assert (summary["mode"], summary["rounds"]) == ("damped", result["rounds"])
    assert summary["accuracy"] == pytest.approx(result["accuracy"]) and (place / "Damped.json").exists()
    drawn = desk.geomx("draw", "-b", str(base), "-n", "linear", "--format", "svg")
    assert drawn.returncode == 0 and "timeline-damped.svg" in drawn.stdout, drawn.stderr
    assert "#123456" in (base / "linear" / "figures" / "accuracy.svg").read_text()
    assert "linear Damped" in desk.geomx("compare", result["job"]).stdout
    dashboard = desk.start("dashboard", result["job"])
    state = until_read(dashboard)
    assert (state["what"], state["state"]) == ("linear by damped", "done")
    dashboard.terminate()
    assert dashboard.wait(10) == 0
    desk.environment["PYTHONPATH"] = desk.environment["PYTHONPATH"].partition(os.pathsep)[0]
    drawn = desk.geomx("draw", "-b", str(base), "-n", "linear", "--terminal")
    assert drawn.returncode == 0 and "damped" in drawn.stdout, "also where the algorithm is not installed"
    assert desk.json("summarize", "-b", str(base), "-n", "linear", "-m", "damped") == summary
    assert "linear damped" in desk.geomx("compare", result["job"], str(place)).stdout


def test_its_options_join_the_table(tmp_path: Path, install: Callable[[Path], None]) -> None:
    install(offer(tmp_path / "site", "damped", ALGORITHM, name=tmp_path.name))
    assert plugins.find("algorithm", "damped").options[0].flag == "--damping"
    assert plugins.modes()["damped"] == ("Damped", ("#123456", "*", "xx"))
    assert list(plugins.algorithms())[-1] == "damped", "behind those of geomx"


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        ("import nothing_like_it", "No module named 'nothing_like_it'"),
        ("name = 'damped'", "it has no options, refuses"),
        (ALGORITHM.replace('"damped"', '"fsa"'), "there is a plug-in named 'fsa' already"),
    ],
)
def test_one_that_cannot_be_loaded_is_named(
    tmp_path: Path, install: Callable[[Path], None], algorithm: str, why: str
) -> None:
    install(offer(tmp_path / "site", "damped", algorithm, name=tmp_path.name))  # no test imports another's module
    with pytest.raises(InvalidSettings, match=f"the algorithm {tmp_path.name}.damped of {tmp_path.name} ") as caught:
        plugins.algorithms()
    assert why in caught.value.message
