"""MXNet scripts as launch starts them, and their parameters compared with those of one process."""

import os
import subprocess
import sys
from pathlib import Path

import forks
import numpy as np
from cluster import ROOT, Cluster

SCRIPTS = (ROOT / "tests") / "scripts"
HOOK = ROOT / "geomx_cli" / "runtime" / "hook"
LOAD = "from geomx_cli.runtime.frontends.mxnet.load import load_mxnet; load_mxnet()"
ENDS = (
    "the master worker has set the job up; it does not train, and ends here; global_rank 0 is the one to save a model\n"
)


def hooked(script: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """A script's argv and environment as launch starts it: the plain script, with the hook on PYTHONPATH."""
    return [sys.executable, str(SCRIPTS / script), *arguments], {"PYTHONPATH": f"{HOOK}{os.pathsep}{ROOT}"}


def check_parameters(directory: Path, ranks: int, reference: list[str]) -> None:
    """All ranks have the same parameters, equal to those of the reference, which runs alone."""
    alone = forks.server("stock").start([*reference, str(ranks)], os.environ, directory, directory / "reference.out")
    assert alone.wait(240) == 0, (directory / "reference.out").read_text()
    wanted = list(np.load(directory / "reference.npz").values())
    first = list(np.load(directory / "params-0.npz").values())
    assert len(first) == len(wanted) > 2
    for mine, theirs in zip(first, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-6)
    for rank in range(1, ranks):
        other = np.load(directory / f"params-{rank}.npz").values()
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def run_hooked(code: str, role: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """Run Python code with the hook on the path and the variables of a role."""
    path = os.pathsep.join(map(str, [HOOK, ROOT, *paths]))
    env = {**os.environ, "PYTHONPATH": path, "DMLC_ROLE": role, "DMLC_PS_ROOT_URI": "127.0.0.1"}
    argv = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=240, check=False)


def assert_master_ended(cluster: Cluster) -> None:
    """Its script ended early and successfully; the others ran to their end."""
    assert cluster.output("master").count(ENDS) == 1, cluster.outputs()
    assert "Traceback" not in cluster.output("master"), cluster.output("master")
    assert not any(ENDS in cluster.output(name) for name in cluster.processes if name != "master")
