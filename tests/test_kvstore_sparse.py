"""Row-sparse arrays in real clusters: the same results as dense ones, and gluon.Trainer with sparse gradients."""

import numpy as np
import pytest
from cluster import Cluster
from test_mxnet_store import SCRIPTS, check_parameters, hooked


@pytest.mark.timeout(60)
def test_row_sparse_arrays_count_as_dense_ones(cluster: Cluster) -> None:
    argv, env = hooked("sparse.py", "rules")
    cluster.launch(argv, env=env, parties=(2, 1), roots=2)
    cluster.finish(50)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["gradient", "weight"])
def test_trainer_trains_an_embedding_as_one_process_would(cluster: Cluster, kind: str) -> None:
    argv, env = hooked("sparse.py", kind)
    cluster.launch(argv, env=env, parties=(1, 1))
    cluster.finish()
    check_parameters(cluster.directory, 2, [str(SCRIPTS / "sparse.py"), kind])
    assert all(np.isfinite(one).all() for one in np.load(cluster.directory / "params-0.npz").values())
