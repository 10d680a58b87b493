"""The types of stores: which ones are ours, and which make a job asynchronous. Dozens of keys on several servers."""

import pytest
from cluster import Cluster
from mxnet_scripts import hooked


@pytest.mark.parametrize("kind", ["dist", "dist_device_async"])
def test_the_type_of_the_master_decides_for_all_parties(cluster: Cluster, kind: str) -> None:
    argv, env = hooked("kinds.py", kind, "hand")
    cluster.launch(argv, env=env, parties=(1, 1), roots=2, local_servers=2)
    cluster.finish()


def test_with_global_ranks_the_type_of_global_rank_0_decides(cluster: Cluster) -> None:
    argv, env = hooked("kinds.py", "dist_async", "trainer")
    env["GEOMX_RANK_SCOPE"] = "global"
    cluster.launch(argv, env=env, parties=(1, 1), roots=2, local_servers=2, central=False)
    cluster.finish()


@pytest.mark.parametrize(
    ("kind", "way"),
    [("dist_async_device", "hand"), ("dist_device_sync", "trainer")],
)
def test_in_a_flat_cluster_the_type_of_rank_0_decides(cluster: Cluster, kind: str, way: str) -> None:
    argv, env = hooked("kinds.py", kind, way)
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(2)}
    cluster.launch_flat(argv, workers=2, servers=2, env=env, worker_env=ranks)
    cluster.finish()


@pytest.mark.parametrize("place", ["server", "worker"])
def test_weights_of_fp16_are_updated_in_fp32(cluster: Cluster, place: str) -> None:
    argv, env = hooked("half.py", place)
    cluster.launch(argv, env=env, parties=(2, 1))
    cluster.finish()
