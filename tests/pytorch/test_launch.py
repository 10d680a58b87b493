"""`geomx launch` with PyTorch: a single-process script made distributed by three lines, and the bundled job."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cluster import ROOT
from desk import Desk
from forked_launch import ForkedLaunch
from idx import write_data
from killed_scripts import killed_at
from rehearsal import Rehearsal
from safetensors.numpy import load_file
from workers import SCRIPTS

from geomx_cli.core import starter
from geomx_cli.runtime.bundled import networks

pytestmark = pytest.mark.processes


TWO = ("--parties", "2", "--workers", "1", "--job-dir", "job")


CLASSIFIER = (
    ("    train_data, test_data", "    geomx.init()\n"),
    ("    train_loader =", "    train_data = geomx.shard(train_data)\n"),
    ("    scheduler =", "    optimizer = geomx.wrap(model, optimizer)\n"),
)
GPT = (
    ("    seed_offset = 0\n", "    geomx.init()\n    ddp = False\n"),
    ("    torch.manual_seed(1337)\n", "    seed_offset = geomx.global_rank()\n"),
    ("    torch.manual_seed(1337 + seed_offset)\n", "    optimizer = geomx.wrap(model, optimizer)\n"),
    ("    if seed_offset == 0:\n", "    geomx.finish()\n"),
)


def distributed(folder: Path, script: str = "plain.py", lines: Sequence[tuple[str, str]] = CLASSIFIER) -> Path:
    """A plain script with the three lines."""
    text = (SCRIPTS / script).read_text()
    for before, line in lines:
        assert text.count(before) == 1
        text = text.replace(before, line + before)
    text = text.replace("import torch\n", "import geomx_cli.torch as geomx\nimport torch\n", 1)
    text = text.replace('"model.pt"', 'f"model-{geomx.global_rank()}.pt"')
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_three_lines_make_a_plain_script_distributed(desk: Desk, tmp_path: Path) -> None:
    distributed(tmp_path)
    words = ("--local", "--json", *TWO, "--", "python", "train.py", "--epochs", "2", "--amp")
    done = ForkedLaunch.run(desk, *words, imported="torch")
    logs = [path.read_text() for path in sorted(tmp_path.glob("job/logs/*worker*.log"))]
    assert done.returncode == 0, (done.errors, logs)
    result = json.loads(done.output)
    assert result["status"] == "done" and len(logs) == 2, "the master is a worker that trains"
    (compared,) = desk.json("compare", str(tmp_path / "job"))["jobs"]
    assert compared["warnings"] == result["warnings"] == []
    lines = [line for path in tmp_path.glob("job/events/*") for line in path.read_text().splitlines()]
    rounds = [json.loads(line).get("round", 0) for line in lines]
    assert result["rounds"] == 40 == max(rounds), "the batches of both epochs"
    models = [torch.load(tmp_path / f"model-{rank}.pt") for rank in range(2)]
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert "[0/320]" in logs[0] and float(logs[0].rpartition("accuracy ")[2]) > 0.9, logs[0]


REPORTS = """
import sys

import geomx_cli.torch as geomx
import torch

geomx.init()
own = geomx.global_rank() if sys.argv[1:] == ["own"] else 0
model = torch.nn.Linear(4, 1)
optimizer = geomx.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(1, 4) * (step + own + 1)).square().mean()
    loss.backward()
    optimizer.step()
    geomx.report(samples=1, loss=loss, norm=model.weight.detach().norm(), rank=geomx.global_rank())
geomx.finish()
geomx.report(final=model.weight.detach().sum())
"""


SAID = {"own": [], "same": ["workers 0 and 1 train on the same batches"]}


@pytest.mark.parametrize("data", ["own", "same"])
def test_all_reports_of_tensors_are_recorded(desk: Desk, tmp_path: Path, data: str) -> None:
    """Also those of the last half second, which are written when the script has ended. Equal batches affect the
    result: the summary repeats the warning.
    """
    (tmp_path / "train.py").write_text(REPORTS)
    words = ("--local", *TWO, "--", "python", "train.py", data)
    if data == "same":
        launched = ForkedLaunch.run(desk, "--json", *words, imported="torch")
        assert launched.returncode == 0, launched.errors
        result = json.loads(launched.output)
        (compared,) = desk.json("compare", str(tmp_path / "job"))["jobs"]
        told = [text.partition(": ")[2] for text in compared["warnings"]]
        assert told == result["warnings"], "as in all reports, with the job's name"
    else:
        job = Rehearsal(desk, *words, imported="torch")
        job.finish()
        result = json.loads(job.output)
    assert result["rounds"] == 6, "one for each step"
    assert [warning.partition(":")[0] for warning in result["warnings"]] == SAID[data]
    finals = set()
    for party in "AB":
        lines = (tmp_path / f"job/events/{party}-worker-0.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        *steps, last = [event for event in events if event["event"] == "reported"]
        told = [event["loss"] for event in events if event["event"] == "telemetry" and event.get("loss") is not None]
        assert told[-1] == steps[-1]["loss"], "status shows the newest of both"
        assert [event["step"] for event in steps] == list(range(6)) and last["step"] == 5
        assert all(event["loss"] > 0 and event["metrics"]["norm"] > 0 for event in steps)
        finals.add(last["metrics"]["final"])
    assert len(finals) == 1, "all workers have one model"


def test_three_lines_in_a_language_model(desk: Desk, tmp_path: Path) -> None:
    """Local steps between exchanges, with two workers and shared weights."""
    distributed(tmp_path, "gpt.py", GPT)
    words = (*TWO, "--algo", "diloco", "--inner-steps", "20", "--", "python", "train.py")
    job = Rehearsal(desk, "--local", *words, "--max-iters", "100", "--output", "ckpt.pt", imported="torch")
    job.finish()
    logs = "".join(path.read_text() for path in sorted(tmp_path.glob("job/logs/*worker*.log")))
    assert float(logs.rpartition("loss ")[2]) < 3, logs
    assert (tmp_path / "ckpt.pt").exists()


def test_the_plan_of_a_script(desk: Desk, tmp_path: Path) -> None:
    """All algorithms count the workers of all parties, so there is no worker beside those that train."""
    distributed(tmp_path)
    for algorithm in ("fsa", "hfa"):
        words = ["launch", "--local", "--dry-run", "--json", "--algo", algorithm]
        done = desk.geomx(*words, "--", "python", "train.py")
        assert done.returncode == 0, done.stderr
        processes = json.loads(done.stdout)["processes"]
        workers = [process for process in processes if process["role"] == "worker"]
        assert [worker["global_rank"] for worker in workers] == [0, 1, 2, 3], algorithm
        assert {worker["env"]["GEOMX_FRAMEWORK"] for worker in workers} == {"torch"}


def test_a_script_that_runs_alone_says_what_to_do(tmp_path: Path) -> None:
    path = distributed(tmp_path)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    said = done.stderr.splitlines()[-1]
    assert said.startswith("geomx_cli.core.errors.InvalidSettings: this script was not started by geomx (geomx launch")


WITH_MXNET = str(ROOT / ".venv" / "bin" / "python")


def test_batch_normalization_is_that_of_mxnet(desk: Desk, tmp_path: Path) -> None:
    """The same tensors, from the same weights and samples; running variances differ: docs/reference/pytorch.md."""
    data = write_data(tmp_path / "data", train=64)
    found: dict[str, Any] = {}
    for framework, python in (("torch", sys.executable), ("mxnet", WITH_MXNET)):
        words = ["--framework", framework, "--network", "cnn-bn", "--data-dir", str(data), "--batch-size", "8"]
        words += ["--epochs", "3", "--parties", "1", "--workers", "2", "--lr", "0.02", "--momentum", "0"]
        job = Rehearsal(desk, "--local", "--job-dir", framework, *words, imported=framework, python=python)
        job.finish()
        (model,) = job.directory.glob("outputs/*/model.safetensors")
        found[framework] = load_file(model)
        assert json.loads(model.with_name("manifest.json").read_text())["framework"] == framework
    assert list(found["torch"]) == list(found["mxnet"])
    for name, array in found["torch"].items():
        assert array.shape == found["mxnet"][name].shape
        if not name.endswith("variance"):
            np.testing.assert_allclose(array, found["mxnet"][name], rtol=1e-4, atol=2e-6, err_msg=name)


def test_resnet18_has_the_tensors_of_mxnets(tmp_path: Path) -> None:
    code = (
        "import json; from geomx_cli.runtime.bundled import networks;"
        "found = networks.find('resnet18-v1', (3, 32, 32), 10, 'mxnet');"
        "print(json.dumps([[p.name, p.shape, p.start] for p in (*found.parameters, *found.statistics)]))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([WITH_MXNET, "-c", code], env=env, cwd=tmp_path, capture_output=True, timeout=240, check=True)
    ours = networks.find("resnet18-v1", (3, 32, 32), 10, "torch")
    found = [[item.name, list(item.shape), item.start] for item in (*ours.parameters, *ours.statistics)]
    assert found == json.loads(done.stdout) and len(found) > 60


@pytest.mark.parametrize("name", sorted({name for name in starter.templates() if "torch" in name} - {"torch-lm"}))
def test_a_template_trains(desk: Desk, tmp_path: Path, name: str) -> None:
    data = write_data(tmp_path / "data", train=400)
    done = desk.geomx("init", "here", "--template", name)
    assert (done.returncode, done.stderr) == (0, "")
    options, script = done.stdout.splitlines()[-1].split("geomx launch")[1].split(" -- python ")
    words = (*shlex.split(options), "--local", "--workers", "1", "--job-dir", str(tmp_path / "job"))
    own = ("--data-dir", str(data), "--batch-size", "8", "--epochs", "2")
    job = Rehearsal(desk, *words, "--", "python", script, *own, imported="torch", folder=tmp_path / "here")
    job.finish()
    result = json.loads(job.output)
    assert result["status"] == "done" and result["accuracy"] > 0.5 and result["samples_per_s"] > 0
    disturbed = [*shlex.split(options), "--workers", "1"]
    killed = killed_at(desk, "0:0:12,0:1:17,1:0:20", disturbed, [script, *own], tmp_path / "here", "torch")
    found, wanted = (next(each.glob("outputs/*-worker-0/model.pt")) for each in (killed, tmp_path / "job"))
    torch.testing.assert_close(torch.load(found), torch.load(wanted), rtol=0, atol=0)
