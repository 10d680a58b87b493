"""The users' imports: the whole public API in a real job; and that templates need nothing else."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cluster import ROOT, Cluster
from idx import write_data
from imports import imports
from mxnet_scripts import HOOK, hooked, run_hooked

import geomx_cli.mxnet
import geomx_cli.torch
from geomx_cli.runtime.data import reader


def test_what_is_public() -> None:
    assert geomx_cli.mxnet.__all__ == [
        "InvalidSettings", "KVStore", "Samples", "fit", "global_rank", "init", "is_master", "load_data",
        "num_all_workers", "report", "shard", "should_stop", "state",
    ]  # fmt: skip
    assert geomx_cli.torch.__all__ == [
        "DiLoCo", "GeomxError", "InvalidSettings", "LocalSGD", "Training", "finish", "global_rank", "init", "is_master",
        "load_data", "load_text", "no_sync", "num_all_workers", "report", "sampler", "shard", "should_stop",
        "state", "wrap",
    ]  # fmt: skip
    for module in (geomx_cli.mxnet, geomx_cli.torch):
        assert all(getattr(module, name).__doc__ for name in module.__all__)


@pytest.mark.parametrize("path", sorted((ROOT / "templates").glob("*.py")), ids=lambda path: path.stem)
def test_templates_use_what_is_public(path: Path) -> None:
    module = geomx_cli.torch if path.stem.startswith("torch") else geomx_cli.mxnet
    assert set(imports(path)) == {module.__name__}
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "geomx"
    }
    least = {"report", "state"}
    assert least <= used <= set(module.__all__) and (used == least) == (path.stem == "train")


def test_workers_share_the_data(cluster: Cluster, tmp_path: Path) -> None:
    """Two parties and a master that does not train: each sample is in at most one part, with either split."""
    folder = write_data(tmp_path / "data", train=90)
    argv, env = hooked("public.py", str(folder), str(tmp_path))
    cluster.launch(argv, env=env, parties=(2, 1))
    cluster.finish()
    found = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (-1, 0, 1, 2)}
    assert {said["workers"] for said in found.values()} == {3}
    assert [rank for rank, said in found.items() if said["master"]] == [-1]
    assert "a master that does not train" in found.pop(-1)["refused"]
    samples = reader.load("fashion-mnist", "train", folder)
    known = {image.tobytes().hex() for image in samples.images}
    assert len(known) == 90
    for split in ("iid", "by-party"):
        parts = [set(said[split]) for said in found.values()]
        assert [len(part) for part in parts] == [30, 30, 30] and set.union(*parts) == known
    parties = [[said["labels"] for said in found.values() if said["party"] == size] for size in (2, 1)]
    first, second = sorted((sorted({label for part in party for label in part}), 30 * len(party)) for party in parties)
    ordered = np.sort(samples.labels)  # parties have classes of their own; the first to join has the lowest
    assert max(first[0]) == ordered[first[1] - 1] and min(second[0]) == ordered[first[1]]


@pytest.mark.processes
def test_mxnet_stays_mxnet_where_our_folder_is_on_the_path() -> None:
    """With the hook a script imports MXNet, although geomx_cli/mxnet.py comes first; without it, the error explains
    why.
    """
    code = "import sys, mxnet as mx; print(mx.nd.ones(1).asscalar(), mx.__file__)"
    path = os.pathsep.join(map(str, (ROOT / "geomx_cli", HOOK, ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "DMLC_PS_ROOT_URI": "127.0.0.1"}
    argv = [sys.executable, "-W", "ignore", "-c", code]
    for role in ("worker", "server"):
        done = subprocess.run(
            argv, env={**env, "DMLC_ROLE": role}, capture_output=True, text=True, timeout=240, check=False
        )
        if role == "worker":
            number, where = done.stdout.split()
            assert number == "1.0" and ROOT / "geomx_cli" not in Path(where).parents, done
        else:
            assert "geomx_cli/mxnet.py is not MXNet: take its folder off sys.path" in done.stderr


@pytest.mark.processes
def test_importing_it_does_not_import_mxnet() -> None:
    code = "import geomx_cli.mxnet, geomx_cli.torch, sys; print('mxnet' in sys.modules, 'torch' in sys.modules)"
    assert run_hooked(code, "worker").stdout == "False False\n"


@pytest.mark.processes
def test_a_script_that_geomx_has_not_started_is_refused() -> None:
    for name in ("mxnet", "torch"):
        done = run_hooked(f"import geomx_cli.{name} as geomx; geomx.init()", "server")
        assert "InvalidSettings: this script was not started by geomx" in done.stderr, done
