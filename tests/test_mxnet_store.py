"""MXNet scripts, unmodified, on real clusters: the KVStore's rules, training, failures, and the import hook alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, RUNTIME, Cluster

SCRIPTS = Path(__file__).parent / "scripts"
HOOK = ROOT / "geomx_cli" / "runtime" / "hook"
WORKERS = ("Aw0", "Aw1", "Bw0", "Bw1")
PARTIES = {name: {"GEOMX_PARTY": name[0]} for name in WORKERS}


def hooked(script: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """How launch starts a script: by itself, with the hook on PYTHONPATH."""
    return [sys.executable, str(SCRIPTS / script), *arguments], {"PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["int", "str"])
def test_conformance(cluster: Cluster, kind: str) -> None:
    argv, env = hooked("conformance.py", kind)
    cluster.launch(argv, env=env, worker_env=PARTIES)
    cluster.finish(50)


def check_parameters(directory: Path, ranks: int, reference: list[str]) -> None:
    """All ranks have the same parameters, and they are those of the reference, which runs alone."""
    code = "import runpy, sys; from geomx_cli.runtime.mxnet_store import load_mxnet; load_mxnet(); sys.argv.pop(0);"
    argv = [sys.executable, "-W", "ignore", "-c", code + "runpy.run_path(sys.argv[0], run_name='__main__')"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*argv, *reference, str(ranks)], cwd=directory, check=True, timeout=30, env=env)
    wanted = list(np.load(directory / "reference.npz").values())
    first = list(np.load(directory / "params-0.npz").values())
    assert len(first) == len(wanted) > 3
    for mine, theirs in zip(first, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-6)
    for rank in range(1, ranks):
        other = np.load(directory / f"params-{rank}.npz").values()
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("place", ["server", "worker"])
def test_the_customary_script_trains_as_one_process_would(cluster: Cluster, place: str) -> None:
    argv, env = hooked("cnn.py", place)
    if place == "worker":
        argv, env = [*RUNTIME, *argv[1:]], {}
    cluster.launch(argv, env=env, worker_env=PARTIES, parties=(2, 1))
    cluster.finish()
    check_parameters(cluster.directory, 3, [str(SCRIPTS / "cnn.py"), place])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("place", "name"), [("server", "sgd"), ("server", "adam"), ("server", "scheduled"), ("worker", "adam")]
)
def test_gluon_trainer_trains_as_one_process_would(cluster: Cluster, place: str, name: str) -> None:
    argv, env = hooked("trainer.py", place, name)
    cluster.launch_flat(argv, workers=2, env=env)
    cluster.finish()
    check_parameters(cluster.directory, 2, [str(SCRIPTS / "trainer.py"), place, name])
