"""TSEngine in clusters of real processes: the sums are those of direct delivery."""

from pathlib import Path

import numpy as np
import pytest
from averages import SCRIPT as AVERAGES
from averages import SIZES as SIZES_OF_AVERAGES
from averages import expected as averages
from averages import found_in as averages_in
from cluster import Cluster
from forced_relays import BY_HAND, launch_planned, relayed
from in_flight import SCRIPT as IN_FLIGHT
from in_flight import check_results, check_rounds
from in_flight import expected as expected_in_flight
from rounding import rounded
from rounds import SCRIPT, assert_equal, expected, found_in, initial, run

from geomx_cli.core.options import Value
from geomx_cli.inventory import WanLink

PROCESSES = {
    "inter": ("A-server-0", "B-server-0"), "intra": ("A-worker-0", "A-worker-1"),
}  # fmt: skip
"""Those of index 0 and 1, by the level at which they relay."""

pytestmark = pytest.mark.processes


def assert_relayed(cluster: Cluster, through: str) -> None:
    """Both local servers and the workers of A have sent through each other."""
    for ends in PROCESSES.values():
        sender, relay = (ends[int(end)] for end in through.split(":"))
        assert relayed(cluster, sender, "sent") > 0 and relayed(cluster, relay, "received") > 0


@pytest.mark.parametrize("through", ["1:0", "0:1"])
def test_the_same_bits_as_with_direct_delivery(cluster: Cluster, tmp_path: Path, installed: None, through: str) -> None:
    """The sum of two does not depend on the order."""
    launch_planned(cluster, 2, through, 10, {"forced": "both"}, SHUFFLE="1")
    cluster.finish()
    assert_equal(found_in(tmp_path), expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 10), optimizer=True))
    assert_relayed(cluster, through)


def test_six_parties_with_thirty_keys_in_flight(cluster: Cluster, tmp_path: Path, installed: None) -> None:
    """Two relays with two parties each, and in each party one worker through the other. The order of the sums differs,
    so the last bits may.
    """
    sizes = [500 + 10 * index for index in range(30)]
    forced = {"forced": "both"}
    launch_planned(
        cluster, 6, "1:0 2:0 4:3 5:3", 3, forced, SIZES=",".join(map(str, sizes)), SHUFFLE="2"
    )  # fmt: skip
    cluster.finish()
    parties = [[2 * index, 2 * index + 1] for index in range(6)]
    wanted = expected(parties, dict.fromkeys(range(12), 3), optimizer=True, sizes=sizes)
    found = found_in(tmp_path)
    assert sorted(found) == list(range(12))
    for arrays in found.values():
        for got, want in zip(arrays, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    for name in ("A-server-0", "D-server-0", "A-worker-0", "F-worker-0"):
        assert relayed(cluster, name, "received") > 0, name


def test_central_workers_relay_for_each_other_too(cluster: Cluster, tmp_path: Path, installed: None) -> None:
    """They contribute to the global server as workers do to their local server."""
    options = {"forced": "intra", "central_workers": 2, "workers": 1, "rank_scope": "party"}
    launch_planned(cluster, 2, "1:0", 8, options)
    cluster.finish()
    wanted = expected([[0], [1], [2], [3]], dict.fromkeys(range(4), 8), optimizer=True)
    for arrays in found_in(tmp_path).values():
        for got, want in zip(arrays, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    assert relayed(cluster, "central-worker-0", "received") > 0


def test_rows_are_sent_directly(cluster: Cluster, tmp_path: Path) -> None:
    check_rounds(cluster, tmp_path, 1, "both", True, 5, **BY_HAND, THROUGH="1:0", GEOMX_FORCED="both")


@pytest.mark.parametrize(("level", "compress"), [("inter", "fp16"), ("intra", "")])
def test_no_order_of_pushes_blocks(cluster: Cluster, tmp_path: Path, level: str, compress: str) -> None:
    """fp16 passes contributions on alone."""
    sizes, rounds = (3_000, 2_000, 3_000, 5_000), 12
    cluster.environment = {
        **BY_HAND, "THROUGH": "1:0", "OUT": str(tmp_path / "w{rank}.npz"), "SIZES": ",".join(map(str, sizes)),
        "ROUNDS": str(rounds), "AHEAD": str(rounds), "BY_KEY": "1", "SERVER_OPTIMIZER": "1", "GEOMX_WINDOW": "8192",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024", "GEOMX_FORCED": level, "GEOMX_COMPRESS": compress,
    }  # fmt: skip
    cluster.launch(IN_FLIGHT, roots=3)
    cluster.finish()
    converted = {"crossed": lambda array: rounded(array, 11)} if compress else {}
    check_results(tmp_path, expected_in_flight(True, sizes, rounds, **converted))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_precisions(cluster: Cluster, tmp_path: Path, dtype: str) -> None:
    env = {**BY_HAND, "THROUGH": "1:0", "DTYPE": dtype, "ROUNDS": "8", "GEOMX_FORCED": "both"}
    found = run(cluster, tmp_path, env)
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 8), optimizer=True, dtype=dtype))


@pytest.mark.parametrize("rounds", ["3,3,9,9", "9,9,3,3"])
def test_either_party_may_leave_before_the_other(cluster: Cluster, tmp_path: Path, rounds: str) -> None:
    """The relay, or a party that it expects contributions of."""
    names = ("Aw0", "Aw1", "Bw0", "Bw1")
    cluster.each = {name: {"ROUNDS": count} for name, count in zip(names, rounds.split(","), strict=True)}
    found = run(cluster, tmp_path, {**BY_HAND, "THROUGH": "1:0"})
    assert sorted(found) == [0, 1, 2, 3]


@pytest.mark.parametrize("rounds", ["3,9", "9,3"])
def test_either_worker_may_leave_before_the_other(cluster: Cluster, tmp_path: Path, rounds: str) -> None:
    found = run(cluster, tmp_path, {**BY_HAND, "THROUGH": "1:0", "GEOMX_FORCED": "intra", "ROUNDS": rounds})
    first, second = map(int, rounds.split(","))
    wanted = expected([[0, 1], [2, 3]], {0: first, 1: second, 2: first, 3: second}, optimizer=True)
    longest = (0, 2) if first > second else (1, 3)
    assert_equal({rank: found[rank] for rank in longest}, wanted)


def test_peers_that_do_not_reach_each_other_send_directly(cluster: Cluster, tmp_path: Path, installed: None) -> None:
    """B would send through A, and C through B; A and B are not linked."""
    hosts: dict[str, dict[str, object]] = {"A": {"reachable_from": ()}, "B": {"reachable_from": ("C",)}}
    launch_planned(cluster, 3, "1:0 2:1", 8, {"workers": 1}, hosts)
    cluster.finish()
    wanted = expected([[0], [1], [2]], dict.fromkeys(range(3), 8), optimizer=True)
    for arrays in found_in(tmp_path).values():
        for got, want in zip(arrays, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    assert relayed(cluster, "C-server-0", "sent") > 0 and not relayed(cluster, "B-server-0", "sent")


def test_averages_of_hfa_have_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    cluster.environment = {
        **BY_HAND, "THROUGH": "1:0", "GEOMX_FORCED": "both", "OUT": str(tmp_path / "w{rank}.npz"), "ROUNDS": "20",
        "PUSH": "weights", "GEOMX_ALGO": "hfa", "MXNET_KVSTORE_HFA_K2": "2",
    }  # fmt: skip
    cluster.launch(AVERAGES)
    cluster.finish()
    for index, size in enumerate(SIZES_OF_AVERAGES):
        wanted = averages([[0, 1], [2, 3]], dict.fromkeys(range(4), 20), 2, index=index, size=size)
        for rank, history in averages_in(tmp_path, f"t{index}").items():
            assert history[-1].tobytes() == wanted[rank][-1].tobytes()


def test_hfa_and_bsc_with_all_deliveries_have_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    """Of three parties one sends through another; of what goes directly the tensors that bsc leaves alone go in blocks,
    in part as datagrams; there are three global servers.
    """
    env = {
        **BY_HAND, "OUT": str(tmp_path / "w{rank}.npz"), "ROUNDS": "60", "PUSH": "weights", "GEOMX_ALGO": "hfa",
        "MXNET_KVSTORE_HFA_K2": "2", "GEOMX_COMPRESS": "bsc:0.05", "MXNET_KVSTORE_SIZE_LOWER_BOUND": "2000",
        "SIZES": "5000,1500,3", "MXNET_KVSTORE_BIGARRAY_BOUND": "2500", "GEOMX_JOB_DIR": str(tmp_path),
    }  # fmt: skip
    for name in ("Asrv0", "Bsrv0", "Csrv0", "root0", "root1", "root2"):
        cluster.each[name] = {"GEOMX_PROCESS": name}
    together = {
        "THROUGH": "1:0", "ENABLE_DGT": "1", "DGT_BLOCK_SIZE": "256", "GEOMX_DGT_WAIT": "40", "ENABLE_P3": "1",
    }  # fmt: skip
    found = []
    for more in ({"THROUGH": ""}, together):
        cluster.environment = {**env, **more}
        cluster.launch(AVERAGES, parties=(1, 1, 1), roots=3)
        cluster.finish()
        cluster.processes.clear()
        found.append([averages_in(tmp_path, f"t{index}") for index in range(3)])
    for direct, through in zip(*found, strict=True):
        assert sorted(direct) == sorted(through) == [0, 1, 2]
        for rank, history in direct.items():
            assert [array.tobytes() for array in history] == [array.tobytes() for array in through[rank]]
    assert relayed(cluster, "Asrv0", "received") > 0
    assert sum(relayed(cluster, f"root{index}", "received", "datagrams") for index in range(3)) > 0


# Contributions that cannot be added on their way.


@pytest.mark.parametrize("compress", ["bsc:0.05", "2bit:0.5"])
def test_encoded_contributions_have_the_same_bits_as_with_direct_delivery(
    cluster: Cluster, tmp_path: Path, compress: str
) -> None:
    """They are passed on alone, so the global server adds the same ones in the same order."""
    codec = {"GEOMX_COMPRESS": compress, "MXNET_KVSTORE_SIZE_LOWER_BOUND": "100"}
    env = {**BY_HAND, **codec, "ROUNDS": "10", "SHUFFLE": "1"}
    for name in ("Asrv0", "Bsrv0", "Csrv0"):
        cluster.each[name] = {"GEOMX_PROCESS": name}
    shape = {"parties": (1, 1, 1)}
    direct = run(cluster, tmp_path, {**env, "THROUGH": ""}, **shape)
    cluster.processes.clear()
    through = run(cluster, tmp_path, {**env, "THROUGH": "1:0 0:2", "GEOMX_JOB_DIR": str(tmp_path)}, **shape)
    assert sorted(through) == sorted(direct) == [0, 1, 2]
    for rank, arrays in direct.items():
        assert_equal({rank: through[rank]}, arrays)
    assert relayed(cluster, "Asrv0", "received") > 0 and relayed(cluster, "Csrv0", "received") > 0


def test_parties_that_do_not_wait_for_each_other_relay_too(cluster: Cluster, tmp_path: Path, installed: None) -> None:
    """Each contribution counts once: two workers of two parties push ones, of which a quarter of a tenth counts."""
    options: dict[str, Value] = {"algo": "mixed", "forced": "both"}
    launch_planned(cluster, 2, "1:0", 20, options, FILL="1", SERVER_OPTIMIZER="plain", PULL="1")
    cluster.finish()
    found = found_in(tmp_path)
    assert sorted(found) == [0, 1, 2, 3]
    for arrays in found.values():
        for index, (got, size) in enumerate(zip(arrays, (70_000, 10, 3), strict=True)):
            np.testing.assert_allclose(got, initial(size, index) - 0.1 * 0.25 * 2 * 2 * 20, rtol=0, atol=1e-4)
    assert_relayed(cluster, "1:0")


# Found without being told.


SLOW_SIZES, SLOW_ROUNDS = (100_000, 100_000, 100_000, 100_000), 15


def star(slow: str, hub: str, others: str) -> tuple[WanLink, ...]:
    """Links between all of these, of which that from `slow` to the hub has a twentieth of the others' rate."""
    names = (slow, hub, *others)
    return tuple(
        WanLink(source=one, target=other, rate=20e6 if {one, other} == {slow, hub} else 400e6, delay=0.002)
        for one in names for other in names if one != other
    )  # fmt: skip


def check_star(cluster: Cluster, parties: list[list[int]], sender: str) -> None:
    """The sums are right, and the hub gets a good part of the bytes of the one behind the slow link through others."""
    cluster.finish()
    wanted = expected(parties, dict.fromkeys(range(3), SLOW_ROUNDS), optimizer=True, sizes=SLOW_SIZES)
    for arrays in found_in(cluster.directory).values():
        for got, want in zip(arrays, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
    assert relayed(cluster, sender, "sent") > 4 * sum(SLOW_SIZES) * SLOW_ROUNDS / 3


def environment_of(tmp_path: Path) -> dict[str, str]:
    return {
        "OUT": str(tmp_path / "w{rank}.npz"), "ROUNDS": str(SLOW_ROUNDS), "SERVER_OPTIMIZER": "1",
        "SIZES": ",".join(map(str, SLOW_SIZES)), "EVENTS": "1",
    }  # fmt: skip


def test_the_party_behind_a_slow_link_finds_a_relay_itself(cluster: Cluster, tmp_path: Path) -> None:
    values: dict[str, Value] = {
        "parties": 3, "workers": 1, "rank_scope": "global", "tsengine": "inter", "heartbeat": 0.2,
    }  # fmt: skip
    cluster.environment = environment_of(tmp_path)
    links = star("A", "central", "BC")
    cluster.launch_planned(cluster.planned(SCRIPT[1:], values, changes={"links": links}))
    check_star(cluster, [[0], [1], [2]], "A-server-0")


def test_the_worker_behind_a_slow_link_finds_a_relay_itself(cluster: Cluster, tmp_path: Path) -> None:
    """Links are emulated between parties, so the workers are given names as if each were one, and the server one that
    tells no party: a root accepts requests of workers of the server's party only.
    """
    values: dict[str, Value] = {
        "parties": 1, "workers": 3, "rank_scope": "global", "tsengine": "intra", "heartbeat": 0.2,
    }  # fmt: skip
    cluster.environment = environment_of(tmp_path)
    links = " ".join(link.text for link in star("X", "A", "YZ"))
    cluster.each["A-server-0"] = {"GEOMX_PROCESS": "A", "GEOMX_LINKS": links}
    for rank, name in enumerate("XYZ"):
        own = {"GEOMX_PROCESS": f"{name}/worker:{rank}", "GEOMX_PARTY": name, "GEOMX_LINKS": links}
        cluster.each[f"A-worker-{rank}"] = own
    cluster.launch_planned(cluster.planned(SCRIPT[1:], values))
    check_star(cluster, [[0, 1, 2]], "X-worker-0")
