"""Which workers kv.rank and kv.num_workers count: those of the job, or of a party in a script written for GeoMX."""

import shlex
import time
from pathlib import Path

import numpy as np
import pytest
from cluster import RUNTIME, Cluster
from desk import Desk
from mxnet_scripts import SCRIPTS, assert_master_ended, hooked
from rehearsal import Rehearsal

from geomx_cli.core.options import defaults
from geomx_cli.core.plugins import table
from geomx_cli.jobs.store.rank_scope import Choice, choose
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine

STOCK = SCRIPTS / "stock.py"


def expected(workers: int) -> np.ndarray:
    """The weights of stock.py in MXNet's own dist_sync with `workers` workers: SGD with momentum on the mean gradient.
    """
    data = np.random.RandomState(3).normal(size=(96, 5)).astype(np.float32)
    label = data @ np.arange(5, dtype=np.float32).reshape(-1, 1)
    weight, momentum = np.ones((1, 5)), np.zeros((1, 5))
    for _ in range(2):
        for first in range(0, 96 // workers, 4):
            taken = np.concatenate([np.arange(96)[rank::workers][first : first + 4] for rank in range(workers)])
            x, y = data[taken].astype(np.float64), label[taken].astype(np.float64)
            momentum = 0.9 * momentum - 0.1 * ((x @ weight.T - y).T @ x) / (4 * workers)
            weight = weight + momentum
    return weight


def check(folder: Path, workers: int) -> None:
    """Each sample belongs to exactly one worker, and one worker has written the weights."""
    taken = [int(number) for path in folder.glob("*.txt") for number in path.read_text().split()]
    assert sorted(taken) == list(range(96))
    assert sorted(path.stem for path in folder.glob("*.txt")) == [str(rank) for rank in range(workers)]
    np.testing.assert_allclose(np.load(folder / "weights.npy"), expected(workers), rtol=1e-4)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "way", "workers"),
    [
        ("--topology spread --global-servers 2 --local-servers 2", "kv", 4),
        ("--global-servers 2 --local-servers 2 --workers 1 --central-workers 2", "trainer", 4),
        ("--topology flat --workers 1", "trainer", 2),
    ],
)
def test_an_unmodified_script_trains_as_one_cluster(
    desk: Desk, tmp_path: Path, options: str, way: str, workers: int
) -> None:
    (tmp_path / "out").mkdir()
    words = ["--local", *shlex.split(options), "--job-dir", "job", "--", "python", str(STOCK), "out", way]
    job = Rehearsal(desk, *words, imported="mxnet")
    job.finish()
    logs = [path.read_text() for path in sorted((tmp_path / "job" / "logs").glob("*-worker-*.log"))]
    assert not any("master worker" in log for log in logs)
    said = "rank scope: global (stock.py uses no GeoMX names); --rank-scope party for "
    assert (said in job.errors) == ("flat" not in options), job.errors
    check(tmp_path / "out", workers)


@pytest.mark.parametrize("central_workers", [0, 1])
def test_by_hand_global_rank_0_is_the_master(cluster: Cluster, central_workers: int) -> None:
    """Roots without the variables of a central plane have none; a central party that trains is last."""
    argv, env = hooked("stock.py", str(cluster.directory), "kv")
    env["GEOMX_RANK_SCOPE"] = "global"
    cluster.launch(argv, env=env, parties=(2, 1), roots=2, central=central_workers > 0, central_workers=central_workers)
    cluster.finish()
    check(cluster.directory, 3 + central_workers)


def test_module_divides_by_all_workers(cluster: Cluster) -> None:
    """Equal to three workers of a flat cluster, up to the order of summation."""
    argv, env = hooked("module.py")
    cluster.launch(argv, env={**env, "GEOMX_RANK_SCOPE": "global"}, parties=(2, 1), central=False)
    cluster.finish()
    first, *others = ([*np.load(cluster.directory / f"params-{rank}.npz").values()] for rank in range(3))
    assert all(np.array_equal(one, another) for other in others for one, another in zip(first, other, strict=True))
    flat = Cluster(cluster.directory / "flat")
    flat.directory.mkdir()
    try:
        flat.launch_flat(argv, workers=3, env=env)
        flat.finish()
    finally:
        flat.stop()
    found = [*np.load(flat.directory / "params-0.npz").values()]
    assert all(np.allclose(one, another, rtol=1e-4, atol=1e-6) for one, another in zip(first, found, strict=True))


def test_by_hand_ranks_are_those_of_the_party(cluster: Cluster) -> None:
    argv, env = hooked("unaware.py", "0")
    cluster.launch(argv, env=env, parties=(2, 1))
    cluster.finish()
    assert_master_ended(cluster)


@pytest.mark.parametrize(
    ("each", "message"),
    [
        ({"GEOMX_RANK_SCOPE": "global"}, "with GEOMX_RANK_SCOPE=global the worker of global rank 0 is the master"),
        ({}, "give all workers of the job the same GEOMX_RANK_SCOPE"),
        ({"GEOMX_RANK_SCOPE": "global", "MXNET_KVSTORE_USE_HFA": "1"}, "a script divides its weights by the workers"),
    ],
)
def test_what_cannot_work_by_hand_is_refused(cluster: Cluster, each: dict[str, str], message: str) -> None:
    """A master that does not train, workers with different scopes, and HFA, which counts the workers of a party."""
    argv = [*RUNTIME, str(STOCK), str(cluster.directory), "kv"]
    first = {"Aw0": {"GEOMX_RANK_SCOPE": "global"}}
    cluster.launch(argv, env=each, worker_env={} if each else first, parties=(1, 1), central=len(each) != 2)
    while message not in cluster.outputs():  # a late process waits long for processes that have ended
        assert any(process.poll() is None for process in cluster.processes.values()), cluster.outputs()
        time.sleep(0.1)


MXNET = "import mxnet as mx\nkv = mx.kv.create('dist_sync')\nmine = data[kv.rank :: kv.num_workers]\n"
OF_GEOMX = "uses num_all_workers"


@pytest.mark.parametrize(
    ("files", "scope", "why"),
    [
        ({"train.py": MXNET}, "global", "train.py uses no GeoMX names"),
        ({"train.py": MXNET + "# kv.num_all_workers\n"}, "global", "train.py uses no GeoMX names"),
        ({"train.py": MXNET + "kv.num_all_workers"}, "party", f"train.py {OF_GEOMX}"),
        ({"train.py": MXNET + "getattr(kv, 'is_master_worker', False)"}, "party", "train.py uses is_master_worker"),
        ({"train.py": MXNET + "self._kv.party"}, "party", "train.py uses _kv.party"),
        ({"train.py": MXNET + "host.party, numpy.versions"}, "global", "train.py uses no GeoMX names"),
        ({"train.py": "from geomx_cli.mxnet import load_data"}, "party", "train.py uses geomx_cli"),
        ({"train.py": "from geomx_cli.mxnet import report\nreport(loss=1)"}, "global", "train.py uses no GeoMX names"),
        ({"train.py": "import geomx_cli.mxnet as g\ng.report(loss=1)"}, "global", "train.py uses no GeoMX names"),
        ({"train.py": "import geomx_cli.mxnet as g\ng.report(loss=g.shard)"}, "party", "train.py uses geomx_cli"),
        ({"train.py": "print 'Python 2', kv.global_rank"}, "party", "train.py uses global_rank"),
        ({"train.py": "import helper", "helper.py": "kv.num_all_workers"}, "party", f"helper.py {OF_GEOMX}"),
        ({"train.py": "import other", "helper.py": "kv.num_all_workers"}, "global", "train.py uses no GeoMX names"),
        (
            {"train.py": "from nets import small", "nets/__init__.py": "", "nets/small.py": "from . import base",
             "nets/base.py": "import train\nkv.num_all_workers"},
            "party", f"nets/base.py {OF_GEOMX}",
        ),
        ({"train.py": "from ..outside import name\nimport " + "x" * 300 + ".x" * 5000}, "global", "no GeoMX names"),
        ({"train.py": "(" * 100_000}, "global", "train.py uses no GeoMX names"),
        ({}, "party", "train.py cannot be read here"),
    ],
)  # fmt: skip
def test_the_scope_follows_the_names_that_a_script_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], scope: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for script in (
        ("python3", "-u", "train.py", "--lr", "1"), ("./train.py",), ("python", "-m", "train"),
        ("nice", "python", "train.py"),
    ):  # fmt: skip
        found = chosen("auto", *script)
        assert found.scope == scope and why in found.why, found


def chosen(asked: str, *script: str, algo: str = "fsa", topology: str = "central") -> Choice:
    values = {**defaults(table()), "topology": topology}
    return choose(asked, script, algo, this_machine(values, range(20_001, 20_001 + ports_needed(values))))


@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("import torch.distributed as dist\nargs.global_rank = dist.get_rank()", "torch"),
        ("from torch import distributed", "torch"),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", "torch"),
        ("import mxnet as mx\nimport torch.distributed", "mxnet"),
        ("import torch\nfrom torch.distributions import Normal", "torch"),
        ("import torchvision", ""),
    ],
)
def test_scripts_for_torch_count_all_workers(tmp_path: Path, text: str, framework: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    found = chosen("auto", "python", str(path))
    assert (found.scope, found.framework) == ("global", framework)
    assert chosen("auto", "python", str(path), algo="hfa").scope == ("global" if framework == "torch" else "party")


def test_a_script_with_the_api_for_mxnet_is_none_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import geomx_cli.mxnet as geomx\nfrom torch.utils.data import DataLoader\n")
    found = chosen("auto", "python", str(path))
    assert (found.scope, found.framework) == ("party", "mxnet")


def test_the_scope_of_other_jobs() -> None:
    assert chosen("auto", "python", str(STOCK)).sentence == (
        "rank scope: global (stock.py uses no GeoMX names);"
        " --rank-scope party for kv.rank within each party, beside a master worker"
    )
    assert chosen("auto", "python", str(SCRIPTS / "unaware.py")).sentence == (
        "rank scope: party (unaware.py uses global_rank);"
        " --rank-scope global for kv.rank over the workers of all parties"
    )
    assert chosen("party", "python", str(STOCK)) == Choice("party", framework="mxnet")
    assert chosen("global", "python", str(SCRIPTS / "unaware.py")) == Choice("global", framework="mxnet")
    assert chosen("auto", "python", str(STOCK), topology="flat").sentence == ""
    assert chosen("auto", "./run.sh").why == "./run.sh is no Python file, so it may use GeoMX's names"
    hfa = chosen("auto", "python", str(STOCK), algo="hfa")
    assert hfa.sentence == "rank scope: party (scripts for hfa divide by the workers of their party)"
