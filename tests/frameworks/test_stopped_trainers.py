"""Trainers of a job that is asked to stop: all end after the same step, with a checkpoint."""

import json
import os
import signal

import pytest
from forked_launch import ForkedLaunch
from runs import SCRIPTS, TWO, Runs

pytestmark = [pytest.mark.processes, pytest.mark.slow]

LOCAL = ("--algo", "diloco", "--inner-steps", "1000")
THOROUGH = pytest.mark.thorough


@pytest.mark.parametrize(
    ("script", "word", "options", "checkpoint"),
    [
        ("trainer.py", "num_train_epochs=100000", LOCAL, "trainer/checkpoint-{steps}/model.safetensors"),
        pytest.param("trainer.py", "num_train_epochs=100000", (), "trainer/checkpoint-{steps}", marks=THOROUGH),
        pytest.param("lit.py", "endless", LOCAL, "lit/*.ckpt", marks=THOROUGH),
        pytest.param("lit.py", "endless", (), "lit/*.ckpt", marks=THOROUGH),
    ],
)  # fmt: skip
def test_trainers_stop_after_the_same_step(
    runs: Runs, script: str, word: str, options: tuple[str, ...], checkpoint: str
) -> None:
    argv = ["python", str(SCRIPTS / script), str(runs.folder / "out"), "line", word]
    words = (*TWO, *options, "--json", "--grace", "60s", "--", *argv)
    job = ForkedLaunch.begin(runs.desk, *words, imported="frameworks")
    log = job.directory / "events" / "A-worker-0.jsonl"
    job.wait_for(lambda: (log.exists() and '"reported"' in log.read_text()) or job.process.poll() is not None)
    os.kill(job.pid("B/worker:0"), signal.SIGTERM)  # for which Lightning has a handler of its own
    assert job.finish() == 75, job.errors
    assert json.loads(job.output)["status"] == "stopped"
    found = runs.kept("out")
    steps = {int(one["steps"]) for one in found}
    assert len(steps) == 1
    assert list((runs.folder / "out").glob(checkpoint.format(steps=steps.pop())))
