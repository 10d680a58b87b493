"""The delivery interface, with an external delivery that relays contributions through another worker."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench import SIZE, Bench, gradient
from cluster import ROOT, Cluster, until
from in_flight import SCRIPT as IN_FLIGHT
from in_flight import check_results, check_rounds
from in_flight import expected as expected_in_flight
from rounding import rounded
from rounds import HOSTILE, PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in, launch_planned, run

from geomx_cli.commands._plan_text import plan_text
from geomx_cli.contract.security import Identity
from geomx_cli.core import deliveries, plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.plan import Plan
from geomx_cli.ps.aggregation.rounds import Accumulator, Contribution
from geomx_cli.ps.net.wire import BadMessage

PLUGINS = ROOT / "tests" / "plugins"
RELAY = {"GEOMX_DELIVERY": "relay", "PYTHONPATH": f"{ROOT}{os.pathsep}{PLUGINS}"}


def planned(cluster: Cluster, one_host: bool, **options: Value) -> Plan:
    values: dict[str, Value] = {"delivery": "relay", "slice_elements": 20_000, **options}
    return cluster.planned(SCRIPT[1:], values, one_host=one_host, env={"PYTHONPATH": str(PLUGINS)})


# Discovery and planning.


def test_a_delivery_of_another_distribution_is_found(installed: None) -> None:
    names = ["dgt", "direct", "tsengine", "relay", "forced"]
    assert list(plugins.deliveries()) == names
    assert {option.name: option.choices for option in plugins.table()}["delivery"] == tuple(names)
    assert deliveries.peers("relay", 3, {}) == {(1, 0)} and not deliveries.peers("relay", 1, {})
    assert not deliveries.peers("direct", 3, {})


def test_one_that_cannot_be_loaded_is_named(installed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "broken-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[geomx.deliveries]\nbroken = nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidSettings, match="the delivery nowhere_at_all of broken cannot be loaded"):
        plugins.deliveries()


def test_workers_that_listen_have_endpoints_ports_and_callers(installed: None, tmp_path: Path) -> None:
    """A unix socket on one host; a port of the host if workers of one plane are on several."""
    found = planned(Cluster(tmp_path), one_host=True, central_workers=2)
    sockets = found.spec.socket_dir
    for party in ("central", "A", "B"):
        (endpoint,) = found.process(f"{party}/worker:0").endpoints
        assert endpoint.bind == endpoint.near == f"ipc://{sockets}/{party}-worker-0.sock" and not endpoint.port
        assert not found.process(f"{party}/worker:1").endpoints
        assert (f"{party}/worker:1", f"{party}/worker:0") in found.links
        assert found.callers[f"{party}/worker:0"] == {f"{party}/worker:1": Identity(f"{party}/worker:1", "worker", 1)}
    assert found.process("A/worker:0").env["GEOMX_BIND"] == f"ipc://{sockets}/A-worker-0.sock"
    assert f"listens      ipc://{sockets}/A-worker-0.sock (slices, local plane)" in plan_text(found)
    flat = planned(Cluster(tmp_path), one_host=False, workers=1, topology="flat")
    (endpoint,) = flat.process("A/worker:0").endpoints
    assert endpoint.protocol == "tcp" and endpoint.bind == f"tcp://127.0.0.1:{endpoint.port}"
    assert ("B/worker:1", "A/worker:0") in flat.links
    ports = [end.port for end in flat.endpoints if end.protocol == "tcp"]
    assert len(ports) == len(set(ports))


# Real clusters: the same bits as with direct delivery.


@pytest.mark.parametrize(
    ("shape", "env"),
    [
        ({"roots": 3, "local_servers": 2}, {"SHUFFLE": "2"}), ({"parties": (3, 1)}, {"SHUFFLE": "3"}),
        ({"central_workers": 3}, {"SERVER_OPTIMIZER": ""}),
    ],
    ids=["several servers", "3 and 1 workers", "central workers, sums"],
)  # fmt: skip
def test_the_same_bits_as_with_direct_delivery(
    cluster: Cluster, tmp_path: Path, shape: dict[str, Any], env: dict[str, str]
) -> None:
    found = run(cluster, tmp_path, {**RELAY, **env}, **shape)
    parties = {"parties": [[0, 1, 2], [3]], "central_workers": [[0, 1], [2, 3], [4], [5], [6]]}
    members = next((parties[name] for name in shape if name in parties), [[0, 1], [2, 3]])
    if "parties" in shape and cluster.output("Bw0").split()[1] == "0":  # B has joined the global plane before A
        members = [[0], [1, 2, 3]]
    everybody = [rank for party in members for rank in party]
    assert sorted(found) == everybody
    if "central_workers" in shape:  # the first two of the central party are merged: their sum is computed first
        members = [[0, 1], [2, 3], [4, 5], [6]]
    wanted = expected(members, dict.fromkeys(everybody, 5), optimizer=env.get("SERVER_OPTIMIZER") != "")
    assert_equal(found, wanted)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_precisions(cluster: Cluster, tmp_path: Path, dtype: str) -> None:
    found = run(cluster, tmp_path, {**RELAY, "DTYPE": dtype, "SHUFFLE": "1"}, parties=(3, 3))
    everybody = dict.fromkeys(range(6), 5)
    assert_equal(found, expected([[0, 1, 2], [3, 4, 5]], everybody, optimizer=True, dtype=dtype))


@pytest.mark.parametrize("rounds", ["3,6", "6,3"])
def test_either_worker_may_leave_before_the_other(cluster: Cluster, tmp_path: Path, rounds: str) -> None:
    """The relaying worker says goodbye last, though it leaves first."""
    found = run(cluster, tmp_path, {**RELAY, "ROUNDS": rounds})
    first, second = map(int, rounds.split(","))
    wanted = expected([[0, 1], [2, 3]], {0: first, 1: second, 2: first, 3: second}, optimizer=True)
    longest = (0, 2) if first > second else (1, 3)
    assert_equal({rank: found[rank] for rank in longest}, wanted)


def test_local_servers_get_half_as_many_messages(cluster: Cluster, tmp_path: Path) -> None:
    names = {name: {"GEOMX_PROCESS": name} for name in ("Asrv0", "Bsrv0", "root0")}
    cluster.each |= names
    run(cluster, tmp_path, {**RELAY, "GEOMX_JOB_DIR": str(tmp_path)})
    slices, rounds = 4 + 1 + 1, 5
    counted = {name: (tmp_path / f"contributions-{name}").stat().st_size for name in names}
    assert counted == {"Asrv0": slices * rounds, "Bsrv0": slices * rounds, "root0": 2 * slices * rounds}


@pytest.mark.parametrize(("cut", "roots", "optimizer"), [("beside", 1, True), ("all", 3, False)])
def test_every_round_is_right_though_links_are_cut(
    cluster: Cluster, tmp_path: Path, cut: str, roots: int, optimizer: bool
) -> None:
    check_rounds(cluster, tmp_path, roots, cut, optimizer, 0, **RELAY)


def test_every_round_of_rows_is_right_though_links_are_cut(cluster: Cluster, tmp_path: Path) -> None:
    check_rounds(cluster, tmp_path, 3, "all", True, 5, **RELAY)


def test_every_compressed_round_is_right_though_links_are_cut(cluster: Cluster, tmp_path: Path) -> None:
    env = {**RELAY, "GEOMX_COMPRESS": "fp16"}
    check_rounds(cluster, tmp_path, 2, "all", True, 0, crossed=lambda array: rounded(array, 11), **env)


def test_no_order_of_pushes_blocks(cluster: Cluster, tmp_path: Path) -> None:
    sizes, rounds = (3_000, 2_000, 3_000, 5_000), 12
    cluster.environment = {
        **RELAY, "OUT": str(tmp_path / "w{rank}.npz"), "SIZES": ",".join(map(str, sizes)), "ROUNDS": str(rounds),
        "AHEAD": str(rounds), "BY_KEY": "1", "SERVER_OPTIMIZER": "1", "GEOMX_WINDOW": "8192",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024",
    }  # fmt: skip
    cluster.launch(IN_FLIGHT, roots=3)
    cluster.finish()
    check_results(tmp_path, expected_in_flight(True, sizes, rounds))


@pytest.mark.parametrize(
    ("options", "one_host"),
    [({"central_workers": 2, "topology": "spread"}, True), ({"topology": "flat"}, False), ({}, False)],
    ids=["spread, one host", "flat, TCP and keys", "central, keys"],
)
def test_planned_clusters(
    cluster: Cluster, tmp_path: Path, installed: None, options: dict[str, Value], one_host: bool
) -> None:
    found_plan = planned(cluster, one_host, **options)
    launch_planned(cluster, found_plan)
    cluster.finish()
    found = found_in(tmp_path)
    parties = [[0, 1, 2, 3]] if options.get("topology") == "flat" else [[0, 1], [2, 3], [4, 5]][: 2 + one_host]
    everybody = [rank for party in parties for rank in party]
    assert_equal(found, expected(parties, dict.fromkeys(everybody, PLANNED_ROUNDS), optimizer=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_member_brings_no_other_contributions_than_it_may(
    cluster: Cluster, tmp_path: Path, installed: None, rank: int
) -> None:
    """Worker 0 may contribute for 1; neither may for 2 and 3, nor twice for any."""
    found_plan = planned(cluster, False, topology="flat")
    (target,) = [end.bind for end in found_plan.process("central/server:0").endpoints if end.protocol == "tcp"]
    liar = found_plan.process(f"A/worker:{rank}")
    cluster.each[liar.file_name] = {"TARGET": target, "OTHER": f"A/worker:{1 - rank}"}
    launch_planned(cluster, found_plan, {liar.file_name: HOSTILE})
    cluster.finish()
    found = found_in(tmp_path)
    assert_equal(found, expected([[0, 1, 2, 3]], dict.fromkeys(range(4), PLANNED_ROUNDS), optimizer=True))
    for ranks in ((0, 2), (1, 0), (1, 1), (0, 1, 3)):
        said = f"refused a message of this process: contributions of ranks {ranks} from rank {rank}"
        assert said in cluster.output(liar.file_name), cluster.outputs()


@pytest.mark.parametrize("killed", ["Aw0", "Aw1"])
def test_a_worker_that_is_killed_ends_the_job_with_its_name(cluster: Cluster, tmp_path: Path, killed: str) -> None:
    cluster.environment = {
        **RELAY, "OUT": str(tmp_path / "w{rank}.npz"), "ROUNDS": "100000", "SERVER_OPTIMIZER": "1",
        "GATES": str(tmp_path), "SEGMENT": "20",
    }  # fmt: skip
    for name in ("Aw0", "Aw1"):
        cluster.each[name] = {"GEOMX_PROCESS": name, "GEOMX_RANK": name[-1]}
    for gate in ("declare", "part0", "leave"):
        (tmp_path / gate).touch()
    cluster.launch(SCRIPT)
    workers = ("Aw0", "Aw1", "Bw0", "Bw1")
    until(lambda: all("at part1" in cluster.output(name) for name in workers))
    (tmp_path / "part1").touch()
    until(lambda: any("at part2" in cluster.output(name) for name in workers))
    os.killpg(cluster.processes[killed].pid, signal.SIGKILL)
    (tmp_path / "part2").touch()
    statuses = cluster.wait()
    for name in {*workers, "Asrv0", "root0"} - {killed}:
        assert statuses[name] and f"{killed} has been gone" in cluster.output(name), cluster.outputs()


# Merged contributions at a server.


def merged(bench: Bench, rank: int, number: int, ranks: Sequence[int], **fields: Any) -> None:
    total = gradient(ranks[0], number)
    for other in ranks[1:]:
        total = total + gradient(other, number)
    given = {"contributors": tuple(ranks), "weight": float(len(ranks)), "request": 100 * number + rank, **fields}
    bench.push(rank, number, total, **given)


def test_a_merged_contribution_counts_for_all_its_ranks_and_is_answered_once() -> None:
    bench = Bench()
    merged(bench, 0, 1, (0, 1))
    ((request, number, value),) = bench.results()
    assert (request, number) == (100, 1) and value.tobytes() == (gradient(0, 1) + gradient(1, 1)).tobytes()
    merged(bench, 0, 1, (0, 1))
    assert len(bench.results()) == 1, "who repeats it has lost the result"
    merged(bench, 0, 2, (0, 1))
    bench.results()
    merged(bench, 0, 1, (0, 1))
    assert not bench.results(), "both have contributed to the next round, so they have it"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the part first", "the sum first"])
def test_a_sum_and_a_part_of_it_count_once_and_both_are_answered(order: tuple[int, int]) -> None:
    """Both are pending until rank 2 contributes; rank 1's own contribution arrived separately, as after a cut."""
    bench = Bench(required_contributors=lambda: [0, 1, 2])
    bench.links.append(bench.links[0])
    steps = [lambda: bench.push(1, 1, gradient(1, 1)), lambda: merged(bench, 0, 1, (0, 1))]
    for step in order:
        steps[step]()
    bench.push(2, 1, gradient(2, 1))
    found = bench.results()
    assert sorted(request for request, _, _ in found) == [11, 12, 100]
    wanted = gradient(0, 1) + gradient(1, 1) + gradient(2, 1)
    assert {value.tobytes() for _, _, value in found} == {wanted.tobytes()}
    assert sum(link.credit for link in bench.links[:2]) == 3 * 4 * SIZE, "and all of it is credited"


@pytest.mark.parametrize("late", [(0, 1), (1, 2), (0, 1, 2)])
def test_what_would_count_a_rank_twice_is_refused(late: tuple[int, ...]) -> None:
    def given(ranks: tuple[int, ...]) -> Contribution:
        return Contribution(ranks, np.ones(1, np.float32), float(len(ranks)), {}, lambda: None)

    accumulator = Accumulator()
    accumulator.park(given((0,)))
    accumulator.merge([0, 1, 2, 3])
    accumulator.park(given((2, 3)))
    with pytest.raises(BadMessage, match="some of them are here with others"):
        accumulator.park(given(late))
    assert accumulator.park(given((1,))) and accumulator.merge([0, 1, 2, 3])
    assert (accumulator.weight, accumulator.total) == (4.0, np.float32(3))


def test_whoever_asks_hears_whether_all_of_a_merged_contribution_is_here() -> None:
    bench = Bench()
    bench.push(0, 1, gradient(0, 1))
    header = {"contributors": (0, 1), "weight": 2.0, "request": 7}
    asked = bench.header(2, round=1, **header)
    bench.rounds.on_exchange(bench.links[0], asked, None, 0)
    assert bench.links[0].again == [7]


def test_members_that_go_through_rounds_by_themselves_cannot_be_merged() -> None:
    bench = Bench("sgd")
    bench.init(np.zeros(SIZE, np.float32))
    assert bench.rounds.switch_to_async()
    with pytest.raises(BadMessage, match="go through rounds by themselves"):
        merged(bench, 0, 1, (0, 1))
