"""The network `gpt` and the template `torch-lm`: trained on a small text, with its validation loss in every record."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from desk import Desk, Launch
from forked_launch import ForkedLaunch
from killed_scripts import killed_at
from rehearsal import Rehearsal
from torch import nn
from torch.nn import functional

from geomx_cli.observe.report.drawing import figures_of
from geomx_cli.observe.report.figures import Curves
from geomx_cli.observe.report.sources import opened
from geomx_cli.runtime.bundled import networks
from geomx_cli.runtime.data.samples import TextSamples
from geomx_cli.runtime.frontends.torch.models.modules import Gpt

SMALL = ("--layers", "1", "--width", "64", "--context", "16", "--batch-size", "8", "--eval-every", "8")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A folder with a text that can be learned, in place of the novels."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "austen.txt").write_bytes(b"It is a truth universally acknowledged. " * 250)
    return folder


def test_the_blocks_are_those_of_pytorch() -> None:
    """nn.TransformerEncoderLayer with normalization first and a causal mask."""
    torch.manual_seed(1)
    model = Gpt(11, 7, 2, 128).eval()
    characters = torch.randint(11, (3, 7))
    state = model.embedding(characters) + model.positions.weight
    for block in model.blocks:
        layer = nn.TransformerEncoderLayer(
            128, 2, 512, 0.0, lambda x: functional.gelu(x, approximate="tanh"), batch_first=True, norm_first=True
        )
        pairs = {
            layer.norm1: block.norm1, layer.norm2: block.norm2, layer.self_attn.out_proj: block.projection,
            layer.linear1: block.dense1, layer.linear2: block.dense2,
        }  # fmt: skip
        for theirs, ours in pairs.items():
            theirs.load_state_dict(ours.state_dict())
        own = {"in_proj_weight": block.attention.weight, "in_proj_bias": block.attention.bias}
        layer.self_attn.load_state_dict(own, strict=False)
        state = layer(state, src_mask=nn.Transformer.generate_square_subsequent_mask(7))
    expected = model.norm(state) @ model.embedding.weight.T
    found = model(characters.view(3, 1, 1, 7).float()).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_tensors_are_in_the_order_of_the_architecture() -> None:
    network = networks.find("gpt", (1, 1, 16), 256, "torch", 2, 64)
    with network.session("", 1):
        model = network.build()
        weights = network.initial_weights(3)
        model.write_weights(np.concatenate([weight.reshape(-1) for weight in weights.values()]))
        samples = TextSamples.of(np.frombuffer(b"a text of some length" * 20, np.uint8), 16)
        model.warm_up(4)
        batch = samples.take(slice(0, 8))
        assert model.mean_loss(batch) == pytest.approx(math.log(256), rel=0.02), "it guesses at first"
        assert float(model.forward_backward(batch, 1.0)) == pytest.approx(model.mean_loss(batch), rel=1e-4)
        assert [tuple(item.shape) for item in model._module.parameters()] == [one.shape for one in network.parameters]


def test_it_trains(desk: Desk, text: Path) -> None:
    words = ("--local", "--json", "--network", "gpt", *SMALL, "--data-dir", str(text), "--workers", "1")
    job = ForkedLaunch.begin(desk, *words, "--epochs", "3", "--lr", "0.01", "--algo", "fsa", imported="torch")
    assert job.finish() == 0, job.errors
    assert "validation loss 5." in job.errors or "validation loss 4." in job.errors, job.errors
    result = json.loads(job.output)
    check(job, result)
    assert result["model"] == str(job.directory / "outputs" / "A-worker-0" / "model.safetensors")
    check_records(desk, result["validation_loss"])


@pytest.mark.parametrize("words", ["mixed", "hfa --k1 4 --k2 2", "diloco --inner-steps 8 --compress sparseloco"])
def test_it_trains_with_other_algorithms(desk: Desk, text: Path, words: str) -> None:
    if "sparseloco" in words:  # which takes longer to learn
        (text / "austen.txt").write_bytes(2 * (text / "austen.txt").read_bytes())
    options = ("--local", "--network", "gpt", *SMALL, "--data-dir", str(text), "--workers", "1", "--job-dir", "job")
    job = Rehearsal(desk, *options, "--epochs", "3", "--lr", "0.01", "--algo", *words.split(), imported="torch")
    job.finish()
    lines = (job.directory / "events" / "A-worker-0.jsonl").read_text().splitlines()
    losses = [event["validation_loss"] for event in map(json.loads, lines) if event["event"] == "evaluation"]
    assert 4 < losses[0] < 6, losses
    check(job, json.loads(job.output))


def check(job: Launch | Rehearsal, result: dict[str, Any]) -> None:
    """Its result, and what the model's manifest has of it."""
    assert result["accuracy"] is None and result["validation_loss"] < 3 < math.log(256)
    (path,) = job.directory.glob("outputs/*/manifest.json")
    manifest = json.loads(path.read_text())
    assert manifest["validation_loss"] == result["validation_loss"] and manifest["accuracy"] is None


def check_records(desk: Desk, loss: float) -> None:
    """What compare and the figures have of the job in ./job."""
    done = desk.geomx("compare", str(desk.folder / "job"), "--csv", "table.csv")
    assert done.returncode == 0 and "validation loss" in done.stdout and f"{loss:.4f}" in done.stdout
    assert "accuracy" not in done.stdout and "bytes to" not in done.stdout, "a language model has none"
    with (desk.folder / "table.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["validation_loss"]) == pytest.approx(loss) and row["accuracy"] == ""
    with opened([str(desk.folder / "job")], lambda *_: None) as runs:
        found = figures_of(runs.runs, ())
    names = {figure.name for figure in found.found}
    assert {"loss", "validation-loss", "bytes"} < names and "accuracy" not in {*names, *found.missing}
    for name in ("validation-loss", "bytes"):
        (figure,) = (figure for figure in found.found if figure.name == name)
        assert isinstance(figure, Curves) and figure.y == "validation loss"
        (curve,) = figure.curves.values()
        assert len(curve.y) > 3 and curve.y[-1] == pytest.approx(loss) and curve.y[-1] < curve.y[0]


def test_the_template_trains(desk: Desk, tmp_path: Path, text: Path) -> None:
    done = desk.geomx("init", "here", "--template", "torch-lm")
    assert (done.returncode, done.stderr) == (0, "") and "geomx data fetch austen" in done.stdout
    options = done.stdout.splitlines()[-1].split("geomx launch")[1].split(" -- ")[0]
    words = ["--local", "--workers", "1", "--job-dir", str(tmp_path / "job"), *options.split()]
    own = ["--data-dir", str(text), "--layers", "1", "--width", "64", "--context", "16", "--batch-size", "8"]
    own += ["--lr", "0.01", "--epochs", "3"]
    job = Rehearsal(desk, *words, "--", "python", "torch_lm.py", *own, imported="torch", folder=tmp_path / "here")
    job.finish()
    result = json.loads(job.output)
    assert result["status"] == "done" and result["validation_loss"] < 4 and result["accuracy"] is None
    disturbed = ["--workers", "1", *options.split()]
    killed = killed_at(desk, "0:0:20,0:1:30,1:0:33", disturbed, ["torch_lm.py", *own], tmp_path / "here", "torch")
    found, wanted = (next(each.glob("outputs/*-worker-0/model.pt")) for each in (killed, tmp_path / "job"))
    torch.testing.assert_close(torch.load(found), torch.load(wanted), rtol=0, atol=0)
