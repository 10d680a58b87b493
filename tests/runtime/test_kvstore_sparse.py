"""Row-sparse arrays in real clusters: results, bytes sent, and gluon.Trainer with sparse gradients."""

import numpy as np
import pytest
from cluster import Cluster, free_ports
from mxnet_scripts import SCRIPTS, check_parameters, hooked
from proxy import Proxy


def test_row_sparse_arrays_count_as_dense_ones(cluster: Cluster) -> None:
    argv, env = hooked("sparse.py", "rules")
    cluster.launch(argv, env=env, parties=(2, 1), roots=2)
    cluster.finish()


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_only_rows_travel_after_the_initial_value(cluster: Cluster, kind: str) -> None:
    """The key is sent to the global server once, and from there once to the party, which then answers pulls itself; if
    parties train asynchronously, only the slice pulled before the first push is sent.
    """
    port, front = free_ports(2)
    proxy, whole = Proxy({front: port}), 100_000 * 64 * 4
    argv, env = hooked("sparse.py", kind)
    listens = {"GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_ADVERTISE": f"tcp://127.0.0.1:{front}"}
    cluster.launch(argv, env=env, root_env=listens, parties=(2,))
    cluster.finish()
    copies, slice_bytes = (2, 0) if kind == "dist_sync" else (1, 2**21)
    assert 0 < proxy.forwarded - copies * whole < whole / 50 + slice_bytes


@pytest.mark.parametrize("kind", ["gradient", "weight"])
def test_trainer_trains_an_embedding_as_one_process_would(cluster: Cluster, kind: str) -> None:
    """With momentum and weight decay, which MXNet applies only to the rows of each gradient."""
    argv, env = hooked("sparse.py", kind)
    cluster.launch(argv, env=env, parties=(1, 1))
    cluster.finish()
    check_parameters(cluster.directory, 2, [str(SCRIPTS / "sparse.py"), kind])
    assert all(np.isfinite(one).all() for one in np.load(cluster.directory / "params-0.npz").values())


def test_module_trains_a_row_sparse_weight_as_one_process_would(cluster: Cluster) -> None:
    argv, env = hooked("sparse.py", "module")
    cluster.launch(argv, env=env, parties=(1, 1))
    cluster.finish()
    check_parameters(cluster.directory, 2, [str(SCRIPTS / "sparse.py"), "module"])
