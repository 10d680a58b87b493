"""--p3: the next forward pass waits tensor by tensor; models and optimizers have the same bits as without."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from desk import Desk
from idx import write_data
from rehearsal import Rehearsal
from safetensors.numpy import load_file
from workers import Workers


@pytest.mark.processes
@pytest.mark.slow
def test_what_scripts_see_has_the_same_bits(workers: Workers) -> None:
    found = []
    for p3 in (True, False):
        workers.start_planned("late.py", wan="8mbit,60ms", p3=p3)
        workers.finish()
        found.append([workers.saved(rank) for rank in range(2)])
    for ours, plain in zip(*found, strict=True):
        late = {name for name in ours if name.endswith(": late")}
        in_time = {name for name in late if not ours[name]}
        assert {"sgd, clipped: late", "layers, first: late"} <= in_time and "layers, last: late" not in in_time
        assert len(late - in_time) > len(late) // 2  # what a busy machine looks at late has come meanwhile
        assert len(late) == 18 and not any(plain[name] for name in late)
        names = ours.keys() - late
        assert len(names) > 12 and [name for name in names if not np.array_equal(ours[name], plain[name])] == []
    first, second = found[0]
    assert all(np.array_equal(first[name], second[name]) for name in first if name.endswith((": model", ": optimizer")))


def test_the_bundled_job_has_the_same_bits(desk: Desk, tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", train=96)
    found: list[Any] = []
    for p3 in ("--p3", "--no-p3"):
        words = ["--framework", "torch", "--network", "cnn-bn", "--data-dir", str(data), "--batch-size", "8", p3]
        words += ["--parties", "2", "--workers", "1", "--wan", "20ms", "--epochs", "2", "--eval-every", "2"]
        job = Rehearsal(desk, "--local", "--job-dir", p3.removeprefix("--"), *words, imported="torch")
        job.finish()
        lines = (job.directory / "events" / "A-worker-0.jsonl").read_text().splitlines()
        accuracies = [event["accuracy"] for event in map(json.loads, lines) if event["event"] == "evaluation"]
        (model,) = job.directory.glob("outputs/*/model.safetensors")
        found.append((load_file(model), accuracies))
    (ours, accuracies), (plain, plain_accuracies) = found
    assert accuracies == plain_accuracies and len(accuracies) > 2
    assert ours.keys() == plain.keys() and all(np.array_equal(ours[name], plain[name]) for name in ours)
