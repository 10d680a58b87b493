"""Several rounds of each key begun while connections are cut: every worker gets the result of every round."""

from pathlib import Path

import pytest
from cluster import Cluster
from in_flight import AHEAD, FAR, ROW, SCRIPT, check_results, check_rounds, expected


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "sums"])
def test_every_round_of_rows_has_its_own_result(cluster: Cluster, tmp_path: Path, optimizer: bool) -> None:
    """A pull after a push of rows returns the rows of that round, though later rounds have begun."""
    check_rounds(cluster, tmp_path, 3, "both", optimizer, ROW)


@pytest.mark.parametrize(
    ("cut", "roots", "optimizer", "ahead"),
    [("both", 1, False, AHEAD), ("above", 3, True, AHEAD), ("both", 3, True, FAR)],
)
def test_every_round_has_its_own_result(
    cluster: Cluster, tmp_path: Path, cut: str, roots: int, optimizer: bool, ahead: int
) -> None:
    """Links of local servers to global servers, or all, are cut some hundred times; also with many rounds begun that
    wait at the worker.
    """
    check_rounds(cluster, tmp_path, roots, cut, optimizer, 0, ahead)


def test_no_order_of_pushes_blocks(cluster: Cluster, tmp_path: Path) -> None:
    """Windows of two slices; each worker begins twelve rounds of one key before those of the next, in a different
    order: the contents of each window wait for messages queued behind other windows.
    """
    sizes, rounds = (3_000, 2_000, 3_000, 5_000), 12
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "SIZES": ",".join(map(str, sizes)), "ROUNDS": str(rounds),
        "AHEAD": str(rounds), "BY_KEY": "1", "SERVER_OPTIMIZER": "1", "GEOMX_WINDOW": "8192",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024",
    }  # fmt: skip
    cluster.launch(SCRIPT, roots=3)
    cluster.finish()
    check_results(tmp_path, expected(True, sizes, rounds))


