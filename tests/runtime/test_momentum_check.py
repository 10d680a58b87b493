"""A script that has momentum in its optimizer and in the codec is warned once; others are not."""

import pytest
from cluster import Cluster
from mxnet_scripts import hooked

WARNING = (
    "has momentum correction, which takes the place of the optimizer's momentum: with momentum {} in the optimizer too,"
    " each gradient counts for {}; set momentum to 0, or use topk"
)


@pytest.mark.parametrize(
    ("place", "momentum", "count"), [("store", "0.9", 100), ("worker", "0.5", 20), ("own", "0.9", 100)]
)
def test_both_have_momentum(cluster: Cluster, place: str, momentum: str, count: int) -> None:
    argv, env = hooked("momentum.py", place, momentum, "mpq" if place == "own" else "")
    codec = {} if place == "own" else {"GEOMX_COMPRESS": "bsc:0.5"}
    ranks = {f"w{rank}": {"GEOMX_RANK": str(rank)} for rank in (0, 1)}
    cluster.launch_flat(argv, workers=2, env={**env, **codec}, worker_env=ranks)
    cluster.finish()
    assert WARNING.format(momentum, count) in cluster.output("w0")
    assert cluster.outputs().count("momentum correction") == 1


@pytest.mark.parametrize("inside", [False, True], ids=["between parties", "inside parties"])
def test_the_master_is_warned_once_if_it_does_not_train(cluster: Cluster, inside: bool) -> None:
    argv, env = hooked("momentum.py", "server", "0.9", "" if inside else "bsc")
    cluster.environment |= {"GEOMX_COMPRESS_LAN": "bsc:0.5"} if inside else {}
    cluster.launch(argv, env=env, parties=(1, 1))
    cluster.finish()
    assert f"warning: bsc {WARNING.format('0.9', 100)}" in cluster.output("master")
    assert cluster.outputs().count("momentum correction") == 1


def test_a_codec_that_does_not_bear_momentum(cluster: Cluster) -> None:
    argv, env = hooked("momentum.py", "store", "0.9", "")
    cluster.launch_flat(argv, workers=2, env={**env, "GEOMX_COMPRESS": "1bit"})
    cluster.finish()
    assert cluster.outputs().count("with 1bit training diverges if the optimizer has momentum, here 0.9") == 1


@pytest.mark.parametrize(
    ("momentum", "codec", "algorithm"),
    [("0", "bsc:0.5", "fsa"), ("0.9", "topk:0.5", "fsa"), ("0.9", "bsc:0.5", "diloco")],
)
def test_only_one_has_momentum(cluster: Cluster, momentum: str, codec: str, algorithm: str) -> None:
    argv, env = hooked("momentum.py", "store", momentum, "")
    cluster.launch_flat(argv, workers=2, env={**env, "GEOMX_COMPRESS": codec, "GEOMX_ALGO": algorithm})
    cluster.finish()
    assert "momentum correction" not in cluster.outputs()
