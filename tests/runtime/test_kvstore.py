"""The Store on a real cluster without a framework, and its rules for keys and values."""

import sys

import pytest
from cluster import ROOT, Cluster

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.script.base_store import pairs

SCRIPT = (ROOT / "tests") / "scripts" / "kv_numpy.py"


def test_four_workers_agree_on_sums_dtypes_keys_and_optimizer(cluster: Cluster) -> None:
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in range(4)}
    cluster.launch_flat([sys.executable, str(SCRIPT)], workers=4, servers=2, worker_env=ranks)
    cluster.finish()


@pytest.mark.parametrize(
    ("keys", "values", "wanted"),
    [
        (3, "a", [(3, ["a"])]),
        ("k", ["a", "b"], [("k", ["a", "b"])]),
        ([3], ["a"], [(3, ["a"])]),
        ([3, 4], ["a", "b"], [(3, ["a"]), (4, ["b"])]),
        ([3, 4], [["a", "b"], ["c"]], [(3, ["a", "b"]), (4, ["c"])]),
        ([3, 4, 3], ["a", "b", "c"], [(3, ["a", "c"]), (4, ["b"])]),
        ([], [], []),
    ],
)
def test_pairs(keys: object, values: object, wanted: object) -> None:
    assert pairs(keys, values) == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize(("keys", "values"), [([3, 4], ["a"]), ([3, 4], "a"), (3, []), ([3], [[]])])
def test_pairs_refuses(keys: object, values: object) -> None:
    with pytest.raises(InvalidSettings):
        pairs(keys, values)  # type: ignore[arg-type]


def test_a_client_takes_arrays_of_any_stride_abstains_and_bounds_what_is_open(cluster: Cluster) -> None:
    script = (ROOT / "tests") / "scripts" / "arrays.py"
    cut = {"MXNET_KVSTORE_BIGARRAY_BOUND": "1024"}
    cluster.launch_flat([sys.executable, str(script)], workers=2, servers=2, env=cut)
    cluster.finish()
