"""Scripts of frameworks as people have them: the numbers of torchrun with gloo; see docs/results/accuracy.md."""

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runs import Runs

from geomx_cli.runtime.frontends.torch.trainers import TrainingRun
from geomx_cli.runtime.script import reports

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1800)]


def same(found: Sequence[dict[str, Any]], wanted: Sequence[dict[str, Any]], *but: str) -> None:
    """All that both workers keep is equal, but for the rounding of sums in float32."""
    for rank, (own, control) in enumerate(zip(found, wanted, strict=True)):
        assert list(own) == list(control)
        for name in own:
            if name not in but:
                np.testing.assert_allclose(own[name], control[name], rtol=2e-4, atol=2e-6, err_msg=f"{name} of {rank}")


def equal_in_both(found: Sequence[dict[str, Any]], *names: str) -> None:
    for name in names:
        np.testing.assert_array_equal(found[0][name], found[1][name], err_msg=name)


LOCAL = "--algo hfa --k1 1 --k2 1"


def test_gradients_are_averaged_as_by_torchrun(runs: Runs) -> None:
    """HF Trainer, PEFT, Accelerate and Lightning in one script after another, with clipping, bfloat16, accumulation and
    evaluation. All but Lightning have their line, which changes nothing with fsa but shows the log values. One worker
    imports them after our hook, as a user's do.
    """
    found = runs.job("all.py", "gradients", "line", late=("B/worker:0",))
    same(found, runs.control("all.py", "gradients"))
    equal_in_both(found, "trainer/weights", "adapters/weights", "accelerated/weights", "lit/weights")
    reported = runs.events("reported")
    assert all(any(event.get(name) is not None for event in reported) for name in ("loss", "accuracy"))
    assert any("validation_loss" in event["metrics"] for event in reported)
    assert "average_tokens_across_devices=False" in runs.log(), "the round trip that can be spared"


def test_one_line_makes_local_steps_of_each_framework(runs: Runs) -> None:
    """Means of the weights after each step of SGD are what means of gradients give, so everything is as by torchrun:
    the parts of the data, schedules, accumulation, losses, evaluation; and a checkpoint goes on where it was saved.
    """
    control = runs.control("all.py", "weights")
    for script, word in (("trainer.py", "max_grad_norm=0"), ("accelerated.py", "noclip"), ("lit.py", "noclip")):
        name = script.removesuffix(".py")
        found = runs.job(script, "line", word, options=LOCAL, name=name)
        prefix = f"{name}/"
        same(found, [{key.removeprefix(prefix): one[key] for key in one if key.startswith(prefix)} for one in control])
        equal_in_both(found, "weights")
        reported = runs.events("reported", name=name)
        assert any(event.get("loss") is not None for event in reported), f"{name}: log values need no report"
    ways = (
        ("trainer", "trainer/trainer/checkpoint-4", "max_grad_norm=0"), ("lit", "lit/lit/epoch=0.ckpt", "noclip"),
    )  # fmt: skip
    for name, checkpoint, word in ways:
        words = ("line", f"resume={runs.folder / checkpoint}", word)
        resumed = runs.job(f"{name}.py", *words, options=LOCAL, name=f"{name}-resumed")
        np.testing.assert_array_equal(resumed[0]["weights"], runs.kept(name)[0]["weights"], err_msg=name)


def test_several_optimizers_in_lightning(runs: Runs) -> None:
    found = runs.job("lit.py", "line", "adversaries", options=LOCAL)
    same(found, runs.control("lit.py", "adversaries"))
    equal_in_both(found, "weights")
    *_, last = runs.events("reported")
    assert last["samples"] == 2 * 20, "each once, whatever the number of optimizers"


def test_diloco_with_a_codec_in_a_trainer(runs: Runs) -> None:
    """Adam's local steps: the workers' models differ between rounds, and are one at the end, as evaluated and saved."""
    options = "--algo diloco --inner-steps 4 --compress sparseloco"
    found = runs.job("trainer.py", "line", "optim=adamw_torch", "learning_rate=0.01", options=options)
    equal_in_both(found, "weights", "accuracy")
    assert found[0]["logs"][-1, 1] < 0.99 * found[0]["logs"][0, 1], "the loss falls"


@pytest.mark.parametrize(
    ("kind", "options"), [("trainer", "--algo hfa --k1 2 --k2 1"), ("lit", "--algo diloco --inner-steps 2")]
)
def test_a_killed_worker_goes_on_at_the_same_batch(runs: Runs, kind: str, options: str) -> None:
    """Model, learning rate, log values and batches have the bits of an undisturbed job, of which nothing is saved."""
    kills = ("0:0:5", "1:0:8", "0:1:9")  # the last one in the epoch after
    calm = runs.job("killed.py", kind, options=f"--framework torch {options}", name="calm")
    disturbed = runs.supervised("killed.py", kind, *kills, options=f"--framework torch {options}", name="disturbed")
    for own, control in zip(disturbed, calm, strict=True):
        for name in control:
            np.testing.assert_array_equal(own[name], control[name], err_msg=name)
    assert runs.log("A-worker-0", "disturbed").count("this worker goes on at") == 2
    assert not any(event.get("affects_result") for event in runs.events("warning", name="disturbed"))


@pytest.mark.parametrize(
    ("script", "checkpoint"),
    [("trainer.py", "trainer/checkpoint-4"), ("accelerated.py", ""), ("lit.py", "lit/epoch=0.ckpt")],
)
def test_esync_with_a_slow_worker(runs: Runs, script: str, checkpoint: str) -> None:
    """The frameworks' collectives wait for all workers, whose rounds end at other steps in each; one is done first.
    All go on from the checkpoint of rank 0, and take the steps that are left.
    """
    found = runs.job(script, "line", "slow", options="--algo esync")
    ways = {"job": found}
    if checkpoint:
        resume = f"resume={runs.folder / 'job' / checkpoint}"
        ways["resumed"] = runs.job(script, "line", "slow", resume, options="--algo esync", name="resumed")
    first = found[0]["logs"][:4, 1].mean() if script == "trainer.py" else found[0]["losses"][:4].mean()
    for name, kept in ways.items():
        equal_in_both(kept, "weights")
        losses = kept[0]["logs"][:, 1] if script == "trainer.py" else kept[0]["losses"]
        assert np.nanmean(losses[-4:]) < first, (name, losses)
        assert checkpoint == "" or kept[0]["steps"] == found[0]["steps"]
        assert not any(event.get("affects_result") for event in runs.events("warning", name=name))


def test_what_log_values_are_reported_as(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(reports, "report", lambda **values: found.append(values))
    for rank in range(2):
        monkeypatch.setattr(TrainingRun, "_store", SimpleNamespace(global_rank=rank))
        run = TrainingRun()
        run.report({"train_loss": math.nan, "grad norm": torch.tensor([[2.0]]), "text": "no number"}, 3, samples=8)
        run.report({"eval_loss": 1.5, "eval_accuracy": 0.25, "accuracy": 25.0, "step": 7, "2nd": 1, "x" * 80: 0.0}, 3)
    first, second, third = found
    assert math.isnan(first.pop("loss")) and math.isnan(third.pop("loss")), "status and the result warn of it"
    assert third == {"step": 3, "samples": 8, "accuracy": None}
    assert first == {**third, "grad_norm": 2.0}
    renamed = {"log/accuracy": 25.0, "log/step": 7.0, "log/2nd": 1.0, "x" * 64: 0.0}
    assert second == {"step": 3, "samples": None, "loss": None, "accuracy": 0.25, "validation_loss": 1.5, **renamed}


def test_without_its_line_a_loop_says_what_is_missing(runs: Runs) -> None:
    failure = runs.failure("native.py", "compiled", options="--algo diloco")
    assert "geomx.hf or geomx.lightning" in failure.hint


def test_what_pytorch_brings(runs: Runs) -> None:
    """FSDP2, torch.compile, DCP and PowerSGD."""
    parts = ("fsdp", "compiled", "checkpoint", "power_sgd")
    same(runs.job("native.py", *parts), runs.control("native.py", *parts))


def test_hydra(runs: Runs) -> None:
    words = ("+rate=0.5", "+steps=4")
    same(runs.job("configured.py", *words), runs.control("configured.py", *words))
