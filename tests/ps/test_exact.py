"""Final parameters, bit for bit, against the same sums computed in one process."""

import sys
from pathlib import Path

import numpy as np
import pytest
from cluster import ROOT, Cluster, free_ports, until
from rounds import SCRIPT, SIZES, assert_equal, expected, found_in, initial, run


@pytest.mark.parametrize(("roots", "shuffle", "optimizer"), [(1, "1", False), (3, "2", True)])
def test_any_arrival_and_any_number_of_roots_give_the_same_bits(
    cluster: Cluster, tmp_path: Path, roots: int, shuffle: str, optimizer: bool
) -> None:
    found = run(cluster, tmp_path, {"SHUFFLE": shuffle, "SERVER_OPTIMIZER": "1" if optimizer else ""}, roots=roots)
    assert len(found) == 4
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=optimizer))


def test_uneven_numbers_of_batches_end_cleanly(cluster: Cluster, tmp_path: Path) -> None:
    found = run(cluster, tmp_path, {"ROUNDS": "3,6"})
    wanted = expected([[0, 1], [2, 3]], {0: 3, 1: 6, 2: 3, 3: 6}, optimizer=True)
    assert_equal({rank: found[rank] for rank in (1, 3)}, wanted)


def test_parties_without_an_index_are_in_the_order_in_which_they_join(cluster: Cluster, tmp_path: Path) -> None:
    cluster.each = {name: {"GEOMX_PARTY_INDEX": ""} for name in ("Asrv0", "Bsrv0")}
    found = run(cluster, tmp_path, {})
    assert len(found) == 4
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))


def test_two_local_servers_share_a_party(cluster: Cluster, tmp_path: Path) -> None:
    found = run(cluster, tmp_path, {"SHUFFLE": "3"}, roots=2, local_servers=2)
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))


def test_central_workers_come_after_the_parties(cluster: Cluster, tmp_path: Path) -> None:
    found = run(cluster, tmp_path, {}, central_workers=2)
    assert len(found) == 6
    assert_equal(found, expected([[0, 1], [2, 3], [4], [5]], dict.fromkeys(range(6), 5), optimizer=True))


def test_a_small_window_and_a_slow_first_rank_drop_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """Members push in different orders, much more than the window admits, and rank 0 is always late."""
    env = {"SHUFFLE": "5", "GEOMX_WINDOW": str(2**17), "ROUNDS": "3"}
    slow = {"Aw0": {"SLOW": "0.05"}, "Bw0": {"SLOW": "0.02"}}
    found = run(cluster, tmp_path, env, worker_env=slow)
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 3), optimizer=True))


def test_a_cluster_that_was_killed_starts_again_at_once_on_its_ports(cluster: Cluster, tmp_path: Path) -> None:
    ports, folder = free_ports(4), tmp_path / "killed"
    folder.mkdir()
    killed = Cluster(folder, {"OUT": str(folder / "w{rank}.npz"), "ROUNDS": "100000", "SERVER_OPTIMIZER": "1"})
    try:
        killed.launch(SCRIPT, ports=ports)
        until(lambda: all("all members have joined" in killed.output(name) for name in ("As", "Bs", "gs")))
    finally:
        killed.stop()
    found = run(cluster, tmp_path, {}, ports=ports)
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))


def test_flat(cluster: Cluster, tmp_path: Path) -> None:
    out = str(tmp_path / "w{rank}.npz")
    cluster.environment = {"OUT": out, "SHUFFLE": "1", "SERVER_OPTIMIZER": "1"}
    cluster.launch_flat(SCRIPT, servers=2)
    cluster.finish()
    found = found_in(tmp_path)
    assert_equal(found, expected([[0, 1, 2, 3]], dict.fromkeys(range(4), 5), optimizer=True))


def test_bytes_up_and_down_are_the_model_plus_less_than_a_percent(cluster: Cluster, tmp_path: Path) -> None:
    """A local server exchanges the model once in each direction with the root in each round."""
    sizes = 2_000_000
    env = {"SIZES": str(sizes), "ROUNDS": "4", "MXNET_KVSTORE_BIGARRAY_BOUND": "262144", "GEOMX_JOB_DIR": str(tmp_path)}
    names = {name: {"GEOMX_PROCESS": name} for name in ("Aw0", "Aw1", "Bw0", "Bw1", "master")}
    run(cluster, tmp_path, env, worker_env=names)
    for name in names.keys() - {"master"}:
        line = next(line for line in cluster.output(name).splitlines() if line.startswith("bytes "))
        sent, received = eval(line.removeprefix("bytes "))["lan"]
        payload = 4 * sizes * 4
        assert payload <= sent < payload * 1.01
        assert payload * 5 / 4 <= received < payload * 5 / 4 * 1.01


def test_members_whose_pushes_cross_do_not_wait_for_each_other(cluster: Cluster) -> None:
    cluster.environment = {"GEOMX_WINDOW": "4096", "MXNET_KVSTORE_BIGARRAY_BOUND": "1024"}
    cluster.launch([sys.executable, str(ROOT / "tests/scripts/crossed.py")])
    cluster.finish()


@pytest.mark.parametrize(("dtype", "optimizer"), [("float16", False), ("float16", True), ("float64", True)])
def test_other_precisions(cluster: Cluster, tmp_path: Path, dtype: str, optimizer: bool) -> None:
    env = {"DTYPE": dtype, "SERVER_OPTIMIZER": "1" if optimizer else "", "SHUFFLE": "1"}
    found = run(cluster, tmp_path, env, roots=2, parties=(3, 3))
    everybody = dict.fromkeys(range(6), 5)
    assert_equal(found, expected([[0, 1, 2], [3, 4, 5]], everybody, optimizer, dtype=dtype))


@pytest.mark.parametrize("optimizer", [False, True])
def test_half_precision_overflows_only_where_it_travels(cluster: Cluster, tmp_path: Path, optimizer: bool) -> None:
    """Sums are fp32 inside a server and fp16 between two: 60000 reaches the root, 120000 only reaches its optimizer."""
    env = {"DTYPE": "float16", "FILL": "30000", "ROUNDS": "1", "SERVER_OPTIMIZER": "1" if optimizer else ""}
    found = run(cluster, tmp_path, env)
    wanted = [np.full(size, np.inf, np.float16) for size in SIZES]
    if optimizer:
        step = np.float32(0.1) * (np.float32(0.25) * np.float32(120_000))
        start = [initial(size, index, "float16").astype(np.float32) for index, size in enumerate(SIZES)]
        wanted = [(weight - step).astype(np.float16) for weight in start]
    assert_equal(found, wanted)
    assert "Warning" not in cluster.outputs()
