"""Scripts written for torchrun: torch.distributed over the job's servers, compared with gloo."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cluster import Cluster, clean_environment, free_ports
from desk import Desk
from rehearsal import Rehearsal
from workers import SCRIPTS, Workers

from geomx_cli.runtime.frontends.torch.ddp.distributed import register

pytestmark = pytest.mark.processes
UNDER_LAUNCH = ("--local", "--parties", "2", "--workers", "1", "--job-dir", "job", "--", "python")
WITH_GLOO = [str(SCRIPTS / "with_gloo.py")]


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[Any]:
    """Runs a script with gloo in so many workers, without geomx's hook, in the folder that it returns."""
    folder = tmp_path / "gloo"
    folder.mkdir()
    cluster = Cluster(folder, imported="torch")

    def run(script: str, *arguments: str, count: int = 4) -> Path:
        (port,) = free_ports(1)
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            env = {**shared, **own, "PYTHONPATH": clean_environment()["PYTHONPATH"]}
            cluster.start(f"w{rank}", [sys.executable, *WITH_GLOO, str(SCRIPTS / script), *arguments], env)
        cluster.finish(250)
        return folder

    yield run
    cluster.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "near", "count"), [("float32", 1e-6, 4), ("bfloat16", 2e-2, 4), ("float32 compile", 1e-6, 2)]
)
def test_ddp_trains_as_with_gloo(workers: Workers, gloo: Any, dtype: str, near: float, count: int) -> None:
    """The same weights and statistics of batch normalization in each worker after 20 steps, from the weights of rank 0.
    Only before the first step the statistics take a round trip of their own.
    """
    arguments = ["20"] if dtype == "float32" else ["20", *dtype.split()]
    folder = gloo("ddp.py", *arguments, count=count)
    workers.start("ddp.py", *arguments, parties=(count // 2, count // 2))
    workers.finish(250)
    ours = [workers.saved(rank) for rank in range(count)]
    for rank, mine in enumerate(ours):
        with np.load(folder / f"{rank}.npz") as file:
            theirs = dict(file)
        assert (str(theirs.pop("backend")), str(mine.pop("backend"))) == ("gloo", "geomx")
        assert (theirs.pop("broadcasts"), mine.pop("broadcasts")) == (20, 1)
        for name, value in theirs.items():
            np.testing.assert_allclose(mine[name], value, rtol=near, atol=near, err_msg=name)
            if "running" not in name:
                assert np.array_equal(mine[name], ours[0][name]), name


@pytest.mark.timeout(120)
def test_buffers_that_a_forward_pass_reads(workers: Workers) -> None:
    """Each forward pass finds those of rank 0, whatever changed them; a warning tells that this takes a round trip."""
    workers.start("buffers.py", count=2)
    workers.finish()
    outputs = [workers.cluster.output(name) for name in ("w0", "w1")]
    said = "DistributedDataParallel broadcasts buffers (1.scale) before every forward pass"
    assert sorted(text.count(said) for text in outputs) == [0, 1], outputs


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["collectives.py", "meshes.py"])
def test_collectives_of_gloo_are_as_the_script_expects(gloo: Any, script: str) -> None:
    folder = gloo(script)
    assert all("all are right" in (folder / f"w{rank}.out").read_text() for rank in range(4))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("compress", ["", "int8"])
def test_collectives(workers: Workers, compress: str) -> None:
    """Exact also where gradients are encoded."""
    env = {"GEOMX_COMPRESS": compress, "GEOMX_COMPRESS_MIN": "1"} if compress else {}
    workers.start("collectives.py", count=4, parties=(2, 2), env=env)
    workers.finish(250)
    assert all("all are right" in workers.cluster.output(name) for name in ("Aw0", "Aw1", "Bw0", "Bw1"))


@pytest.mark.timeout(300)
def test_other_operations(workers: Workers, gloo: Any, tmp_path: Path) -> None:
    """As the script expects, with gloo too; PowerSGD gives the same weights."""
    folder = gloo("operations.py", str(tmp_path / "theirs"), count=3)
    env = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    workers.start("operations.py", str(tmp_path / "ours"), count=3, env=env)
    workers.finish(250)
    for rank in range(3):
        assert "all are right" in workers.cluster.output(f"w{rank}")
        theirs, ours = (torch.load(each / f"power{rank}.pt") for each in (folder, workers.cluster.directory))
        torch.testing.assert_close(ours, theirs)


@pytest.mark.timeout(300)
def test_device_meshes_and_fully_shard(workers: Workers) -> None:
    workers.start("meshes.py", count=4, parties=(2, 2))
    workers.finish(250)
    assert all("all are right" in workers.cluster.output(name) for name in ("Aw0", "Aw1", "Bw0", "Bw1"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", ["fsa", "async"])
def test_what_is_not_supported_is_refused_by_name(workers: Workers, algorithm: str) -> None:
    env = {"GEOMX_ALGO": algorithm} if algorithm != "fsa" else {}
    workers.start("refused.py", algorithm, count=2, env=env)
    workers.finish()


def test_modules_whose_import_is_blocked_are_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed.blocked", None)  # type: ignore[arg-type]
    names = {"monitored_barrier": all, "broadcast_object_list": any}
    original = SimpleNamespace(init_process_group=print, new_group=repr, **names)
    register(original, None)  # type: ignore[arg-type]
    assert original.init_process_group is not print and original.new_group is not repr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "first", "second"),
    [
        ("size", "all_reduce SUM of float32 x 5", "all_reduce SUM of float32 x 6"),
        ("dtype", "all_reduce SUM of float32 x 5", "all_reduce SUM of float64 x 5"),
        ("operation", "all_reduce SUM of float32 x 5", "all_reduce MAX of float32 x 5"),
        ("source", "broadcast from 0 of float32 x 5", "broadcast from 1 of float32 x 5"),
        ("parts", "reduce_scatter to 2+3 SUM of float32 x 5", "reduce_scatter to 3+2 SUM of float32 x 5"),
        ("gathered", "all_gather of float32 x 3", "all_gather of float32 x 4"),
        ("call", "all_reduce SUM of float32 x 5", "broadcast from 0 of float32 x 5"),
        ("pass", "barrier", "a backward pass"),
    ],
)
@pytest.mark.parametrize("codec", ["none", "fp16"])
def test_workers_that_make_other_calls(workers: Workers, codec: str, how: str, first: str, second: str) -> None:
    """An error in all of them, at once: with other calls some would wait, and with other sizes get other numbers. That
    of the one that ends first may reach the other as the cause of the job's failure.
    """
    workers.start("unlike.py", how, count=2, env={"GEOMX_COMPRESS": codec})
    workers.cluster.wait()
    for name in ("w0", "w1"):
        output = workers.cluster.output(name)
        assert f" is {first}, and worker 1's is {second}" in output, workers.cluster.outputs()
        assert "all workers must call torch.distributed alike" in output


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["size", "dtype", "operation", "source", "pass"])
def test_other_calls_end_the_job_also_if_the_script_goes_on(workers: Workers, how: str) -> None:
    """At once, and not after --patience: some rounds of these calls have no end. The script itself does not fail."""
    workers.start("unlike.py", how, "caught", count=2)
    statuses = workers.cluster.wait()
    assert all(statuses.values()), workers.cluster.outputs()
    for name in ("w0", "w1"):
        *_, last = workers.cluster.output(name).splitlines()
        assert last.startswith("error: ") and "all workers must call torch.distributed alike" in last


@pytest.mark.timeout(120)
def test_other_calls_within_a_backward_pass(workers: Workers) -> None:
    """At once, though one worker waits in the pass, and the other at its end."""
    workers.start("different.py", "call", count=2)
    assert all(workers.cluster.wait().values())
    said = "in backward pass 5 (operation 10) worker 0's call 1 is all_reduce SUM of float32 x 65, and worker 1's "
    assert f"{said}is all_reduce SUM of float32 x 3" in workers.cluster.outputs(), workers.cluster.outputs()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["wait", "backward"])
def test_a_killed_worker_is_named(workers: Workers, where: str) -> None:
    workers.start("lost.py", "killed", where, count=2)
    statuses = workers.cluster.wait()
    first, second = sorted((workers.cluster.output(name), name) for name in ("w0", "w1"))
    survivor = second if "step 5" in second[0] else first
    assert "step 5: PeerLost: " in survivor[0] and statuses[survivor[1]] == 1, workers.cluster.outputs()


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("ended", "is a backward pass, and worker 1 ended before it, after a backward pass; backward passes: 6 and 5"),
        ("last", "is all_reduce SUM of float32 x 1, and worker 1 ended before it, after a backward pass"),
        ("skipped", "worker 1 skipped batch 6 of its DataLoader, and others did not: let all workers skip it, or none"),
    ],
)
def test_a_worker_that_makes_fewer_calls_is_an_error(workers: Workers, how: str, said: str) -> None:
    """Not a smaller mean, and not a hang; what it did not do is said."""
    workers.start("lost.py", how, "backward", count=2)
    workers.cluster.wait()
    outputs = workers.cluster.outputs()
    assert said in outputs
    assert ("warning: worker 1 skipped batch 6" in outputs) == (how == "skipped")
    assert ("rank == 0" in outputs) == (how == "last")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("single", "each worker trains a model of its own; use torch.distributed.init_process_group"),
        ("grad", "each worker trains a model of its own; gradients are exchanged by loss.backward()"),
        ("foreign hfa", "an optimizer that is not wrapped takes steps of a wrapped model"),
        ("same", "workers 0 and 1 train on the same batches"),
        ("wrapped", "workers 0 and 1 train on the same batches"),
        ("wrapped hfa", "workers 0 and 1 train on the same batches"),
    ],
)
def test_training_that_is_not_together_is_said(workers: Workers, how: str, said: str) -> None:
    how, _, algorithm = how.partition(" ")
    workers.start("alone.py", how, count=2, env={"GEOMX_ALGO": algorithm} if algorithm else {})
    for name in ("w0", "w1"):  # servers whose workers never join wait longer
        assert workers.cluster.processes[name].wait(240) == 0
    outputs = [workers.cluster.output(name) for name in ("w0", "w1")]
    times = [0, 1] if how in ("same", "wrapped") else [1, 1]
    assert [text.count(said) for text in sorted(outputs, key=len)] == times, outputs
    assert how != "same" or "nothing was exchanged" not in outputs[0] + outputs[1], "the model is small"


@pytest.mark.parametrize("algorithm", ["fsa", "hfa"])
def test_batches_that_differ_where_the_gradient_of_a_bias_does_not(workers: Workers, algorithm: str) -> None:
    """And a script that does not call finish is told so where its model was not yet the common one."""
    env = {"GEOMX_ALGO": algorithm, "MXNET_KVSTORE_HFA_K1": "2", "MXNET_KVSTORE_HFA_K2": "1"}
    workers.start("critic.py", parties=(1, 1), env=env)
    workers.finish()
    outputs = [workers.cluster.output(name) for name in ("Aw0", "Bw0")]
    assert not any("same batches" in text for text in outputs), outputs
    told = ["has ended without geomx.finish()" in text for text in outputs]
    assert told == [algorithm == "hfa"] * 2, outputs


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("example", "late"), [("imagenet.py", ("B/worker:0",)), ("imagenet.py --amp", ()), ("gpt.py", ())],
    ids=["late", "amp", "gpt"],
)  # fmt: skip
def test_examples_for_torchrun_run_unchanged(
    desk: Desk, gloo: Any, tmp_path: Path, example: str, late: tuple[str, ...]
) -> None:
    """The same checkpoint as with gloo and the variables of torchrun; also if a worker imports PyTorch after our hook,
    as a user's do.
    """
    script, *options = example.split()
    folder = gloo(script, *options, "--output", "theirs.pt", count=2)
    words = (*UNDER_LAUNCH, str(SCRIPTS / script), *options, "--output", str(tmp_path / "ours.pt"))
    Rehearsal(desk, *words, imported="torch", late=late).finish()
    check_checkpoints(folder / "theirs.pt", tmp_path / "ours.pt")


def check_checkpoints(theirs: Path, ours: Path) -> None:
    """They are the same."""
    right, found = torch.load(theirs), torch.load(ours)
    for name, value in right["model"].items():
        torch.testing.assert_close(found["model"][name], value, rtol=1e-4, atol=1e-5)
    assert right["optimizer"]["param_groups"] == found["optimizer"]["param_groups"]
