"""`geomx init --template`: each script is written, and the command printed with it trains. Those for PyTorch are in
tests/pytorch/.
"""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from cluster import RUNTIME, Cluster
from desk import Desk
from idx import write_data
from killed_scripts import killed_at
from rehearsal import Rehearsal

from geomx_cli.core import starter
from geomx_cli.core.plugins import algorithms

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", [name for name in starter.templates() if not name.startswith("torch")])
def test_a_template_trains(desk: Desk, tmp_path: Path, name: str) -> None:
    data = write_data(tmp_path / "data", train=400)
    done = desk.geomx("init", "here", "--template", name)
    assert (done.returncode, done.stderr) == (0, "")
    wrote, *_, command = done.stdout.splitlines()
    script = wrote.removeprefix("wrote here/")
    assert script == name.replace("-", "_") + ".py" and command.endswith(f" -- python {script}")
    _, verb, *words = shlex.split(command.split(" -- ")[0])
    assert verb == ("sweep" if name == "cnn-sweep" else "launch")
    options = shlex.join(words[:2] if verb == "sweep" else words)  # of a sweep, the first of its algorithms
    result = trained(desk, tmp_path, script, options, data)
    assert result["accuracy"] > 0.5 and result["samples_per_s"] > 0
    found = model_of_killed(desk, tmp_path, script, options, data)
    assert name == "cnn-esync" or found == model(tmp_path / "job"), "ESync's rounds depend on timing"


def test_the_script_of_init_survives_kills(desk: Desk, tmp_path: Path) -> None:
    assert desk.geomx("init", "here").returncode == 0
    own, options = ["--epochs", "2", "--samples", "640"], ["--workers", "1", "--rank-scope", "party"]
    job = Rehearsal(
        desk, "--local", *options, "--job-dir", str(tmp_path / "job"), "--", "python", "train.py", *own,
        imported="mxnet", folder=tmp_path / "here",
    )  # fmt: skip
    job.finish()
    assert json.loads(job.output)["accuracy"] > 0.5
    killed = killed_at(desk, "0:0:15,0:1:9,1:0:25", options, ["train.py", *own], tmp_path / "here", "mxnet")
    assert model(killed) == model(tmp_path / "job")


@pytest.mark.parametrize("options", ["--algo hfa --k1 20 --k2 10", "--algo diloco --inner-steps 1000 --outer-lr 1e-6"])
def test_the_last_steps_are_exchanged(desk: Desk, tmp_path: Path, options: str) -> None:
    """Of 75 steps none is lost, and the outer optimizer has the job's options: at such a rate nothing is learnt."""
    data = write_data(tmp_path / "data", train=400)
    assert desk.geomx("init", "here", "--template", "cnn-sweep").returncode == 0
    result = trained(desk, tmp_path, "cnn_sweep.py", options, data)
    assert (result["accuracy"] > 0.5) == ("hfa" in options), result
    assert model_of_killed(desk, tmp_path, "cnn_sweep.py", options, data) == model(tmp_path / "job")


def trained(desk: Desk, tmp_path: Path, script: str, options: str, data: Path) -> Any:
    """The result of a job of two workers, each of which takes 75 steps; it has no warnings, and one model is saved."""
    job = Rehearsal(
        desk, *shlex.split(options), "--local", "--workers", "1", "--job-dir", str(tmp_path / "job"),
        "--", "python", script, *own_arguments(data), imported="mxnet", folder=tmp_path / "here",
    )  # fmt: skip
    job.finish()
    result = json.loads(job.output)
    assert result["status"] == "done" and result["warnings"] == [], result
    assert len(model(tmp_path / "job")) > 10_000
    return result


def own_arguments(data: Path) -> list[str]:
    """Those of a template's script."""
    return ["--data-dir", str(data), "--batch-size", "8", "--epochs", "3"]


def model(directory: Path) -> bytes:
    """The one model that a job has saved."""
    (path,) = directory.glob("outputs/*-worker-0/model.params")
    return path.read_bytes()


def model_of_killed(desk: Desk, tmp_path: Path, script: str, options: str, data: Path) -> bytes:
    """That of a job of which both workers are killed, one of them twice."""
    words = [*shlex.split(options), "--workers", "1", "--rank-scope", "party"]
    command, folder = [script, *own_arguments(data)], tmp_path / "here"
    directory = killed_at(desk, "0:0:20,0:1:30,1:0:33", words, command, folder, "mxnet")
    return model(directory)


def test_help_lists_all_templates(desk: Desk) -> None:
    listed = desk.geomx("init", "--help").stdout
    for name, summary in starter.summaries().items():
        assert re.search(rf"^  {name} +{re.escape(summary)}$", listed, re.MULTILINE), listed


@pytest.mark.parametrize("name", [name for name in starter.templates() if not name.startswith("torch")])
def test_a_template_uses_the_seed_of_its_job(cluster: Cluster, tmp_path: Path, name: str) -> None:
    """Initial weights: the same for the same seed, others for another one. Each script runs alone."""
    data = write_data(tmp_path / "data", train=64)
    script = starter.FOLDER / starter.templates()[name]
    assert ".batches(given.batch_size, seed=seed, " in script.read_text(), "the order of samples"
    folders = [tmp_path / run for run in ("first", "again", "other")]
    for folder, seed in zip(folders, ("1", "1", "2"), strict=True):
        folder.mkdir()
        variables = {"GEOMX_SEED": seed, "GEOMX_ALGO": name.removeprefix("cnn-"), "GEOMX_OUTPUT_DIR": str(folder)}
        if variables["GEOMX_ALGO"] not in algorithms():
            del variables["GEOMX_ALGO"]
        cluster.start(folder.name, [*RUNTIME, str(script), "--epochs", "0", "--data-dir", str(data)], variables)
    cluster.finish(120)
    first, again, other = ((folder / "model.params").read_bytes() for folder in folders)
    assert first == again != other


def test_what_is_there_already_is_kept(desk: Desk, tmp_path: Path) -> None:
    assert desk.geomx("init", "--template", "cnn").returncode == 0
    (tmp_path / "cnn.py").write_text("mine")
    done = desk.geomx("init", "--template", "cnn")
    assert (done.returncode, done.stdout) == (5, "") and (tmp_path / "cnn.py").read_text() == "mine"
    assert done.stderr == "error: cnn.py is there already\n  --force writes over it\n"
    assert desk.geomx("init", "--template", "cnn", "--force").returncode == 0
    assert (tmp_path / "cnn.py").read_text().startswith('"""Train')
    assert [path.name for path in tmp_path.iterdir()] == ["cnn.py"]


def test_wrong_words(desk: Desk, tmp_path: Path) -> None:
    done = desk.geomx("init", "--template", "qwerty")
    assert (done.returncode, done.stdout) == (2, "") and not list(tmp_path.iterdir())
    assert done.stderr.startswith("error: there is no template 'qwerty'\n  choose one of cnn, cnn-esync, ")
    assert desk.geomx("init", "--force").returncode == 2 and not list(tmp_path.iterdir())
