"""The end of training: two models of each worker, different numbers of steps, and all workers end with the same."""

import numpy as np
import pytest
import torch
from workers import Workers

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("buffers", "master", "env"),
    [
        ("local", True, {"GEOMX_COMPRESS": "topk:0.2", "GEOMX_COMPRESS_LAN": "bf16"}),
        ("mean", False, {"GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K1": "2", "MXNET_KVSTORE_HFA_K2": "2"}),
        ("local", False, {"GEOMX_ALGO": "mixed"}),
    ],
    ids=["fsa", "hfa", "mixed"],
)
def test_all_workers_have_the_same_models(workers: Workers, buffers: str, master: bool, env: dict[str, str]) -> None:
    """With codecs, and beside a master that does not train, which leaves at once."""
    workers.start("pair.py", buffers, "7", "4", "2", parties=(1, 2), master=master, env=env)
    workers.finish()
    if master:
        assert "this master worker does not train, and ends here" in workers.cluster.output("master")
    first, *others = (workers.saved(rank) for rank in range(3))
    assert len(first) == 9
    for name, tensor in first.items():
        assert np.isfinite(tensor).all() and all(np.array_equal(tensor, other[name]) for other in others), name


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
GPU = pytest.param("cuda", marks=needs_gpu)


@needs_gpu
def test_gradients_of_a_gpu(workers: Workers) -> None:
    """As on the CPU, through pinned memory."""
    found = []
    for device in ("cpu", "cuda"):
        workers.start("steps.py", "10", env={"TEST_DEVICE": device})
        workers.finish()
        found.append(workers.saved(0))
    np.testing.assert_allclose(found[0]["weight"], found[1]["weight"], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_exchanges_begin_while_gradients_are_computed(workers: Workers, device: str) -> None:
    """Those of the last layers; on a GPU while it computes. The log has the time of a step with and without geomx."""
    workers.start("overlap.py", device)
    workers.finish()
    for rank, name in enumerate(("w0", "w1")):
        assert "ms with geomx" in workers.cluster.output(name)
        begun = workers.saved(rank)["begun"]
        assert begun.shape == (5, 8) and begun[:, :4].all(), begun


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("Training", {}),
        ("DiLoCo", {"GEOMX_ALGO": "diloco", "GEOMX_INNER_STEPS": "5"}),
        ("LocalSGD", {"GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K1": "2", "MXNET_KVSTORE_HFA_K2": "2"}),
    ],
)
def test_a_context_is_wrap_and_finish(workers: Workers, name: str, env: dict[str, str]) -> None:
    found = []
    for script in (("context.py", name, "8"), ("steps.py", "8")):
        workers.start(*script, env=env)
        workers.finish()
        found += [workers.saved(rank) for rank in range(2)]
    assert all(np.array_equal(one["weight"], found[0]["weight"]) for one in found)


def test_a_script_may_go_on_after_its_context_has_failed(workers: Workers) -> None:
    """The other trains to its end."""
    workers.start("context.py", "Training", "8", "raises")
    workers.finish()
    assert "the loop has ended" in workers.cluster.output("w1")


@pytest.mark.parametrize("steps", ["8", "4"])
def test_a_script_may_go_on_after_a_failed_pass(workers: Workers, steps: str) -> None:
    """In the fourth step. All end with the model of the one that takes all steps, the last one too."""
    workers.start("context.py", "Training", steps, "fails")
    workers.finish()
    assert "the loop has ended" in workers.cluster.output("w1")
    first, second = (workers.saved(rank) for rank in range(2))
    assert np.array_equal(first["weight"], first["last"]) and np.array_equal(second["weight"], first["last"])


def test_a_context_of_another_algorithm_is_refused(workers: Workers) -> None:
    workers.start("context.py", "DiLoCo", "8", "refused")
    workers.cluster.wait()
    assert "geomx_cli.torch.DiLoCo in a job of --algo fsa | launch it with --algo diloco" in workers.cluster.outputs()


@pytest.mark.parametrize(
    "env",
    [{}, {"GEOMX_ALGO": "diloco", "GEOMX_INNER_STEPS": "1", "GEOMX_OUTER_LR": "1", "GEOMX_OUTER_MOMENTUM": "0"}],
    ids=["fsa", "diloco"],
)
def test_two_jobs_in_a_row_train_as_one(workers: Workers, env: dict[str, str]) -> None:
    """The second job continues from each worker's checkpoint of model, optimizer and schedule."""
    found = []
    for script in (("0", "12"), ("0", "5"), ("5", "12")):
        workers.start("resume.py", *script, env=env)
        workers.finish()
        found.append([workers.saved(rank) for rank in range(2)])
    whole, half, resumed = found
    for rank in range(2):
        assert not np.allclose(half[rank]["weight"], whole[rank]["weight"], atol=1e-3)
        for name, value in whole[rank].items():
            np.testing.assert_allclose(resumed[rank][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
