"""--p3 in the bundled job: weights, evaluations and checkpoints have the same bits as without."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import Desk
from idx import write_data
from rehearsal import Rehearsal

WAYS: dict[str, tuple[str, ...]] = {
    "fsa": ("--optimizer", "adam", "--lr", "0.01"), "sync": ("--algo", "sync"),
    "optimizer on the worker": ("--optimizer-on", "worker"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "idx", 96, 32)


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_all_weights_have_the_same_bits(desk: Desk, data: Path, way: str) -> None:
    """Over a link on which results come later than the next step begins; with cnn, whose reads MXNet orders."""
    found = []
    for p3 in ("--p3", "--no-p3"):
        words = ["--parties", "2", "--workers", "1", "--wan", "20ms", "--epochs", "2", "--batch-size", "8"]
        words += ["--eval-every", "2", "--save-every", "3", "--network", "cnn", "--data-dir", str(data), p3]
        job = Rehearsal(desk, "--local", "--job-dir", f"job{p3}", *words, *WAYS[way], imported="mxnet")
        job.finish()
        finished = job.finished()
        assert len(finished) == 2 and len({event["parameters"] for event in finished.values()}) == 1
        found.append((finished["A-worker-0"]["parameters"], _accuracies(job.directory), _checkpoints(job.directory)))
    (parameters, accuracies, checkpoints), plain = found
    assert (parameters, accuracies) == plain[:2] and len(accuracies) > 2
    assert checkpoints.keys() == plain[2].keys() and len(checkpoints) > 2
    for name, content in checkpoints.items():
        assert all((content[key] == plain[2][name][key]).all() for key in content), name


def _accuracies(job: Path) -> list[tuple[int, float]]:
    events = map(json.loads, (job / "events" / "A-worker-0.jsonl").read_text().splitlines())
    return [(event["round"], event["accuracy"]) for event in events if event["event"] == "evaluation"]


def _checkpoints(job: Path) -> dict[str, Any]:
    found = {path.name: dict(np.load(path)) for path in sorted(job.glob("outputs/A-worker-0/checkpoints/*.npz"))}
    return {name: {key: found[name][key] for key in found[name] if key != "seconds"} for name in found}
