"""All algorithms in the bundled job: with one worker each equals plain SGD; with four they train, stop and clean up.

Also their plug-ins' checks of options.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import ROOT, clean_environment
from desk import Desk, Launch
from idx import write_data
from rehearsal import Rehearsal
from safetensors.numpy import load_file

from geomx_cli.cli import main
from geomx_cli.contract.settings import factor_of
from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import defaults
from geomx_cli.runtime.algorithms import fsa, mixed
from geomx_cli.runtime.training.train_config import TrainConfig

WAYS = {
    "fsa": "GEOMX_ALGO=fsa",
    "fsa, optimizer on the worker": "GEOMX_ALGO=fsa,GEOMX_OPTIMIZER_ON=worker",
    "sync": "GEOMX_ALGO=sync",
    "async": "GEOMX_ALGO=async",
    "mixed": "GEOMX_ALGO=mixed,GEOMX_MAX_STALENESS=0",
    "mixed, dcasgd": "GEOMX_ALGO=mixed,GEOMX_OPTIMIZER=dcasgd",
    "mixed, dcasgd-a": "GEOMX_ALGO=mixed,GEOMX_OPTIMIZER=dcasgd-a",
    "hfa": "GEOMX_ALGO=hfa,MXNET_KVSTORE_HFA_K1=1,MXNET_KVSTORE_HFA_K2=1",
    "hfa, samples": "GEOMX_ALGO=hfa,MXNET_KVSTORE_HFA_K1=3,MXNET_KVSTORE_HFA_K2=2,GEOMX_WEIGHT=samples",
    "diloco": "GEOMX_ALGO=diloco,GEOMX_INNER_STEPS=1,GEOMX_OUTER_LR=1,GEOMX_OUTER_MOMENTUM=0",
    "diloco, fragments": "GEOMX_ALGO=diloco,GEOMX_INNER_STEPS=6,GEOMX_FRAGMENTS=2,GEOMX_OVERLAP=1,"
    "GEOMX_OUTER_LR=1,GEOMX_OUTER_MOMENTUM=0,GEOMX_MIX=1",
    "decoupled": "GEOMX_ALGO=decoupled,GEOMX_INNER_STEPS=1,GEOMX_OUTER_LR=1",
    "esync": "GEOMX_ALGO=esync,GEOMX_ESYNC_QUERY=blocking",
    "local": "GEOMX_ALGO=local",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """128 samples; four workers have 32 each."""
    return write_data(tmp_path_factory.mktemp("data") / "idx", 128, 32)


# One worker.


@pytest.fixture(scope="module")
def weights(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The final weights of each variant, and MXNet's own."""
    folder = tmp_path_factory.mktemp("weights")
    script = [sys.executable, str(ROOT / "tests/scripts/one_worker.py"), str(data), str(folder)]
    ways = [f"{name}:{variables}" for name, variables in WAYS.items()]
    done = subprocess.run(
        [*script, *ways], env=clean_environment(), capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return {path.stem: dict(np.load(path)) for path in folder.glob("*.npz")}


@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_with_one_worker_it_is_plain_sgd(weights: dict[str, dict[str, Any]], way: str) -> None:
    assert weights[way].keys() == weights["mxnet"].keys()
    for name, wanted in weights["mxnet"].items():
        np.testing.assert_allclose(weights[way][name], wanted, rtol=0, atol=1e-6, err_msg=name)


# Four workers.

Run = Callable[..., Rehearsal]


@pytest.fixture
def small(data: Path) -> list[str]:
    """The options of a job of the bundled training on 2 x 2 workers."""
    return ["--local", "--network", "linear", "--data-dir", str(data), "--batch-size", "8"]


@pytest.fixture
def rehearsed(desk: Desk, small: list[str]) -> Run:
    """Begins such a job."""
    return lambda algo, *arguments: Rehearsal(desk, "--job-dir", "job", "--algo", algo, *small, *arguments)


def done(job: Rehearsal | Launch, workers: int = 4) -> dict[str, dict[str, Any]]:
    """The final events of the workers of a job that has succeeded, and whose model is saved."""
    assert job.finish() == 0, job.errors
    result = json.loads(job.output)
    assert (result["status"], result["exit_code"], result["failure"]) == ("done", 0, None)
    found = job.finished()
    assert len(found) == workers
    check_model(job.directory / "outputs" / "A-worker-0" / "model.safetensors", found["A-worker-0"])
    return found


def check_model(path: Path, finished: dict[str, Any]) -> None:
    """The saved model is the final one, and its manifest describes the files beside it."""
    manifest = json.loads((path.parent / "manifest.json").read_bytes())
    for name, told in manifest["files"].items():
        content = (path.parent / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (told["size"], told["sha256"])
    weights, digest = load_file(path), hashlib.sha256()
    for name, tensor in manifest["tensors"].items():
        assert (str(weights[name].dtype), list(weights[name].shape)) == (tensor["dtype"], tensor["shape"])
        digest.update(name.encode() + weights[name].tobytes())
    assert digest.hexdigest() == manifest["parameters"] == finished["parameters"]
    assert manifest["accuracy"] == finished["accuracy"] and manifest["rounds"] == finished["rounds"]
    for who, folders in (("worker", "A-worker-0"), ("global", "*-global_server-*")):
        saved = {(folder / "optimizer.safetensors").exists() for folder in path.parent.parent.glob(folders)}
        assert (saved or {False}) == {manifest["optimizers"][who] is not None}, who


@pytest.mark.processes
def test_hfa_stops_everybody_at_a_milestone_with_one_model(desk: Desk, small: list[str]) -> None:
    target = ("--target-accuracy", "0.05", "--eval-every", "4", "--epochs", "1000")
    job = desk.train("--json", "--algo", "hfa", "--k1", "2", "--k2", "2", *small, *target)
    found = done(job)
    job.assert_clean()
    assert json.loads(job.output)["model"] == str(job.directory / "outputs" / "A-worker-0" / "model.safetensors")
    assert {name: event["stopped"] for name, event in found.items()} == {
        "A-worker-0": "target_accuracy", "A-worker-1": "asked", "B-worker-0": "asked", "B-worker-1": "asked",
    }  # fmt: skip
    assert len({event["parameters"] for event in found.values()}) == 1
    (rounds,) = {event["rounds"] for event in found.values()}
    assert rounds % 2 == 0
    assert {event["samples"] for event in found.values()} == {rounds * 2 * 8}


@pytest.mark.processes
def test_a_time_limit_ends_the_job_with_the_round_in_which_it_passes(rehearsed: Run) -> None:
    found = done(rehearsed("diloco", "--inner-steps", "2000", "--time-limit", "0.01s", "--epochs", "10000"))
    assert found["A-worker-0"]["stopped"] == "time_limit"
    assert {(event["rounds"], event["samples"]) for event in found.values()} == {(1, 2000 * 8)}


@pytest.mark.processes
def test_streaming_diloco_stops_everybody_with_one_model(rehearsed: Run) -> None:
    more = ("--inner-steps", "4", "--fragments", "2", "--overlap", "1", "--time-limit", "0.5s", "--epochs", "10000")
    found = done(rehearsed("diloco", *more))
    assert found["A-worker-0"]["stopped"] == "time_limit"
    assert len({event["parameters"] for event in found.values()}) == 1
    assert len({event["samples"] for event in found.values()}) == 1


@pytest.mark.processes
def test_mixed_with_a_slow_party_trains_on_all_samples(rehearsed: Run) -> None:
    job = rehearsed("mixed", "--slowdown", "B=3", "--max-staleness", "2", "--epochs", "2", "--optimizer", "dcasgd")
    found = done(job)
    assert {event["stopped"] for event in found.values()} == {"epochs"}
    assert {(event["samples"], contributions(job, name)) for name, event in found.items()} == {(64, 8)}


@pytest.mark.processes
def test_esync_lets_the_fast_take_more_steps_than_the_slow(rehearsed: Run) -> None:
    """The slow worker completes its epochs, and the others continue until then. Its steps take longer than those of
    others whose machine is busy.
    """
    found = done(rehearsed("esync", "--slowdown", "1000", "--epochs", "3"))
    samples = {name: event["samples"] for name, event in found.items()}
    assert samples.pop("B-worker-1") == 96
    assert min(samples.values()) > 96
    assert len({event["rounds"] for event in found.values()}) == 1


def contributions(job: Rehearsal, worker: str) -> int:
    """The number of rounds in which the worker had data."""
    events = [json.loads(line) for line in (job.directory / f"events/{worker}.jsonl").read_text().splitlines()]
    return sum(event.get("num_samples", 0) > 0 for event in events if event["event"] == "round")


# Options.


def test_flat_algorithms_fix_the_topology() -> None:
    found = plugins.algorithms()
    assert found["sync"].forced_options == found["async"].forced_options == {"topology": "flat"}
    assert found["local"].forced_options == {"topology": "flat", "parties": 1, "workers": 1}
    assert [name for name, algorithm in found.items() if algorithm.needs_local_server] == ["hfa"]
    assert list(found) == ["async", "decoupled", "diloco", "esync", "fsa", "hfa", "local", "mixed", "sync"]


@pytest.mark.parametrize(
    ("compress", "momentum"), [("", 0.9), ("topk:0.01", 0.9), ("bsc:0.01", 0.0), ("mpq:0.01,pull=union", 0.0)]
)
def test_a_codec_with_momentum_takes_the_place_of_the_optimizers(compress: str, momentum: float) -> None:
    """For gradients; algorithms that send differences of weights have their optimizer on every worker."""
    for algorithm in (fsa, mixed):
        for name in ("compress", "compress_lan"):
            config = TrainConfig.from_options({**defaults(), "algo": algorithm.name, name: compress})
            optimizer = algorithm.server_optimizer(config)
            assert optimizer is not None and (optimizer[0], optimizer[1]["momentum"]) == ("sgd", momentum)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("sync --topology spread", 2, "--algo sync works with --topology flat only"),
        ("local --workers 2", 2, "--algo local works with --workers 1 only"),
        ("mixed --optimizer-on worker", 3, "the global servers need an optimizer"),
        ("async --optimizer-on worker", 3, "the global servers need an optimizer"),
        ("mixed --max-staleness -2", 3, "--max-staleness"),
        ("diloco --inner-steps 10 --fragments 3", 3, "--inner-steps 10 is no multiple of --fragments 3"),
        ("diloco --inner-steps 10 --fragments 2 --overlap 5", 3, "less than the 5 steps between two exchanges"),
        ("diloco --outer-momentum 1", 3, "--outer-momentum"),
        ("hfa --optimizer dcasgd", 3, "no delay is to be compensated for"),
        ("hfa --k1 0", 3, "--k1"),
        ("hfa --weight batches", 3, "parties, samples"),
        ("esync --esync-http nowhere", 3, "--esync-http nowhere is not HOST:PORT"),
        ("esync --esync-http host:70000", 3, "is not HOST:PORT"),
        ("esync --optimizer dcasgd-a", 3, "no delay is to be compensated for"),
    ],
)
def test_what_cannot_work_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: str, status: int, words: str
) -> None:
    for name in [name for name in os.environ if name.startswith(("GEOMX_", "MXNET_KVSTORE"))]:
        monkeypatch.delenv(name)
    assert main(["launch", "--local", "--dry-run", "--algo", *arguments.split()]) == status
    said = capsys.readouterr()
    assert words in said.err and not said.out and "Traceback" not in said.err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, str]]:
    """The environment of each process shown by a dry run."""
    assert main(["launch", "--local", "--dry-run", "--json", *arguments]) == 0
    processes = json.loads(capsys.readouterr().out)["processes"]
    return {process["name"]: process["env"] for process in processes}


def test_hfa_gives_the_central_workers_a_local_server(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--algo", "hfa", "--topology", "central", "--central-workers", "2", "--k2", "3")
    central = {name: env for name, env in found.items() if name.startswith("central/")}
    assert list(central) == [
        "central/global_scheduler:0", "central/global_server:0", "central/scheduler:0", "central/server:0",
        "central/worker:0", "central/worker:1",
    ]  # fmt: skip
    assert "DMLC_PS_ROOT_URI" not in central["central/global_server:0"]
    assert central["central/server:0"]["DMLC_NUM_GLOBAL_WORKER"] == "3"
    assert central["central/worker:0"]["DMLC_ROLE_MASTER_WORKER"] == "1"
    assert [env["GEOMX_GLOBAL_RANK"] for name, env in central.items() if "/worker" in name] == ["4", "5"]
    assert not any("DMLC_ENABLE_CENTRAL_WORKER" in env for env in found.values())
    mixed = planned(capsys, "--algo", "mixed", "--topology", "central", "--central-workers", "2")
    assert "central/server:0" not in mixed
    assert mixed["central/global_server:0"]["DMLC_ENABLE_CENTRAL_WORKER"] == "1"


@pytest.mark.parametrize(("algo", "workers"), [("sync", 4), ("async", 4), ("local", 1)])
def test_flat_plans(capsys: pytest.CaptureFixture[str], algo: str, workers: int) -> None:
    roles = [name.partition("/")[2].partition(":")[0] for name in planned(capsys, "--algo", algo)]
    assert sorted(roles) == ["scheduler", "server", *["worker"] * workers]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", (1, 1, 1, 1)),
        ("8", (1, 1, 1, 8)),
        ("A/worker:1=8,B=2", (1, 8, 2, 2)),
        (" A = 2 , A/worker:0=1.5, 3", (3, 2, 1, 3)),
    ],
)
def test_factor(text: str, wanted: tuple[float, ...]) -> None:
    workers = [("A/worker:0", "A"), ("A/worker:1", "A"), ("B/worker:0", "B"), ("B/worker:1", "B")]
    found = [factor_of(text, *worker, is_last=worker == workers[-1]) for worker in workers]
    assert found == list(wanted)


@pytest.mark.parametrize("text", ["0.5", "A=", "A=x", "B=nan", "B=inf", "8x", "A=1,B=0"])
def test_what_is_no_factor(text: str) -> None:
    with pytest.raises(InvalidSettings, match="is no factor"):
        factor_of(text, "A/worker:0", "A", False)
