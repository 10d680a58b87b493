"""The saved model: whole or absent, and what its files contain."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from geomx_cli.agent import outputs
from geomx_cli.core.errors import TrainingFailed
from geomx_cli.ps.optim import optimizers
from geomx_cli.ps.optim.optimizer import LocalOptimizer
from geomx_cli.runtime.bundled import checkpoint, networks
from geomx_cli.runtime.bundled.checkpoint import Checkpoint, Checkpoints, save, save_at_last, save_optimizer
from geomx_cli.runtime.training.model import ModelAdapter


@pytest.fixture
def model() -> ModelAdapter:
    """A linear model with known weights."""
    made = networks.find("linear", (1, 2, 2), 3).build()
    made.write_weights(np.arange(made.size, dtype=np.float32))
    return made


def test_the_files_have_the_weights_and_a_workers_optimizer(model: ModelAdapter, tmp_path: Path) -> None:
    adam = LocalOptimizer(optimizers.create("adam", {"learning_rate": 0.1}))
    adam.update(np.zeros(model.size, np.float32), np.full(model.size, 2, np.float32))
    save(tmp_path / "new", model, adam, {"step": 1}, print)
    weights, kept = load_file(tmp_path / "new/model.safetensors"), load_file(tmp_path / "new/optimizer.safetensors")
    np.testing.assert_equal(weights["dense.weight"], np.arange(12, dtype=np.float32).reshape(3, 4))
    np.testing.assert_equal(weights["dense.bias"], np.arange(12, 15, dtype=np.float32))
    assert kept.pop("step") == [1]
    shapes = {name.partition("/")[0]: array.shape for name, array in kept.items()}
    assert shapes == {"dense.weight": (3, 4), "dense.bias": (3,)} and len(kept) == 4
    manifest = json.loads((tmp_path / "new/manifest.json").read_bytes())
    assert manifest["step"] == 1 and set(manifest["files"]) == {"model.safetensors", "optimizer.safetensors"}
    state = {f"0/0/{name}": array for name, array in adam.state.items()}
    save_optimizer(tmp_path / "root", adam.optimizer, state, print)
    assert load_file(tmp_path / "root/optimizer.safetensors").keys() == state.keys()


def test_a_model_that_cannot_be_written_leaves_the_earlier_one(
    model: ModelAdapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, model, None, {"step": 1}, print)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(before) == {"manifest.json", "model.safetensors"}
    model.write_weights(np.zeros(model.size, np.float32))
    opened = os.open

    def full(path: Path, *arguments: int) -> int:
        if path.name.startswith("model"):
            raise OSError(28, "No space left on device")
        return opened(path, *arguments)

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "LIMIT", 0.0)
    monkeypatch.setattr(outputs, "fallback_folders", lambda folder: [folder / "elsewhere"])
    for name, fails in (("open", full), ("fsync", refuse)):
        with monkeypatch.context() as patch, pytest.raises(TrainingFailed, match="No space left"):
            patch.setattr(os, name, fails)
            save(tmp_path, model, None, {"step": 2}, print)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_the_last_save_tries_again_and_then_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PAUSE", 0.01)
    monkeypatch.setattr(outputs, "fallback_folders", lambda _: [tmp_path / "full too", tmp_path / "other"])
    tried: list[Path] = []
    warnings: list[str] = []

    def write(place: Path) -> None:
        tried.append(place)
        if place.name != "other" and len(tried) != 3:
            raise OSError(28, "No space left on device")

    folder = tmp_path / "job" / "outputs" / "A-worker-0"
    assert save_at_last(folder, write, warnings.append, "the model") == folder and tried == [folder] * 3
    assert warnings[0].startswith(f"cannot save the model in {folder}: No space left on device; trying again")
    assert warnings[1:] == [f"the model could be saved in {folder} now"]
    monkeypatch.setattr(checkpoint, "LIMIT", 0.05)
    assert save_at_last(folder, write, warnings.append, "the model") == tmp_path / "other"
    assert f"the model is in {tmp_path / 'other'} of host" in warnings[-1] and tmp_path / "full too" in tried


def test_a_checkpoint_that_cannot_be_written_warns_and_the_next_one_comes(tmp_path: Path) -> None:
    warnings: list[str] = []
    checkpoints = Checkpoints(str(tmp_path / "out"), 2, warnings.append)
    (tmp_path / "out").touch()  # for a disk that takes no folder
    checkpoints.write(Checkpoint(2, 8, 1, 0.5, {"w": np.ones(2, np.float32)}))
    assert "no checkpoint of step 2" in warnings[0] and warnings[0].endswith("the next one is due 2 steps later")
    (tmp_path / "out").unlink()
    checkpoints.write(Checkpoint(4, 16, 2, 1.0, {"w": np.ones(2, np.float32)}))
    assert Checkpoint.read(tmp_path / "out" / "checkpoints" / "step-4.npz").samples == 16 and len(warnings) == 1
