"""The master worker sets a job up; if it does not train its script ends there, and rounds wait for the set-up."""

from pathlib import Path

import numpy as np
import pytest
from cluster import ROOT, RUNTIME, Cluster
from mxnet_scripts import SCRIPTS, assert_master_ended, check_parameters, hooked

WORKERS = ("Aw0", "Aw1", "Bw0")


def test_a_script_that_knows_no_masters_trains_without_it(cluster: Cluster) -> None:
    """The others push long before the master sets the optimizer, and enter a barrier that it never reaches."""
    argv, _ = hooked("unaware.py", "2")
    cluster.launch([*RUNTIME, *argv[1:]], parties=(2, 1), roots=2)
    cluster.finish()
    assert_master_ended(cluster)
    assert {cluster.output(name) for name in WORKERS} == {f"done {rank}\n" for rank in range(3)}


@pytest.mark.parametrize(("place", "name"), [("server", "ftrl"), ("worker", "sgd")])
def test_gluon_trainer_knows_no_masters(cluster: Cluster, place: str, name: str) -> None:
    """The servers leave FTRL to the workers; SGD runs on the workers if the script says so."""
    argv, env = hooked("trainer.py", place, name)
    parties = {name: {"GEOMX_PARTY": name[0]} for name in WORKERS}
    cluster.launch(argv, env=env, worker_env=parties, parties=(2, 1))
    cluster.finish()
    assert_master_ended(cluster)
    check_parameters(cluster.directory, 3, [str(SCRIPTS / "trainer.py"), place, name])


def test_module_knows_no_masters(cluster: Cluster) -> None:
    """Its optimizers divide by the workers of the party: the training workers' number counts, not the master's."""
    argv, env = hooked("module.py")
    cluster.launch(argv, env=env)
    cluster.finish()
    assert_master_ended(cluster)
    first, *others = (list(np.load(cluster.directory / f"params-{rank}.npz").values()) for rank in range(4))
    assert all(np.array_equal(one, another) for other in others for one, another in zip(first, other, strict=True))
    assert np.isfinite(first[1]).all() and np.ptp(first[1]) > 0.01


def test_in_a_flat_cluster_rank_0_is_the_master_and_trains(cluster: Cluster) -> None:
    argv, env = hooked("unaware.py", "1")
    cluster.launch_flat(argv, workers=3, env=env)
    cluster.finish()
    outputs = [cluster.output(f"w{rank}") for rank in range(3)]
    assert sorted(outputs) == [f"done {rank}\n" for rank in range(3)]


def test_the_script_of_the_documentation(cluster: Cluster) -> None:
    script = cluster.directory / "train.py"
    script.write_text((ROOT / "docs/how-to/mxnet.md").read_text().split("```python\n")[1].split("```")[0])
    cluster.launch([*RUNTIME, str(script)], env={"GEOMX_RANK_SCOPE": "global"}, parties=(2, 1), central=False)
    cluster.finish()
    (last,) = {cluster.output(name).splitlines()[-1].split()[0] for name in WORKERS}
    assert int(last) == 1344, "each has a third"
    assert (cluster.directory / "model.params").exists()


@pytest.mark.processes
def test_a_script_runs_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.start("alone", [*RUNTIME, str(SCRIPTS / "unaware.py"), "0"], {})
    cluster.start("wrong", [*RUNTIME, "unaware.py"], {})
    assert cluster.wait() == {"alone": 0, "wrong": 3}, cluster.outputs()
    said, done = cluster.output("alone").strip().rsplit("\n", 1)
    assert "runs alone, as the only worker" in said and "geomx launch -- python" in said
    assert done == "done 0"
    assert "error: there is no script unaware.py" in cluster.output("wrong")
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".out"]
