"""Differential gradient transmission: nothing lost without loss, important blocks exact with it."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import Cluster, free_ports, until
from in_flight import AHEAD, FAR, check_results, check_rounds
from in_flight import SCRIPT as IN_FLIGHT
from in_flight import expected as expected_in_flight
from rounds import assert_equal, expected, gradient, run

from geomx_cli.contract.config import NodeSettings
from geomx_cli.core import plugins
from geomx_cli.core.event_log import EventLog
from geomx_cli.core.options import defaults
from geomx_cli.ps.aggregation.upstream import UpstreamClient
from geomx_cli.ps.cluster.node import Node
from geomx_cli.ps.cluster.partition import Partition, Tensor
from geomx_cli.ps.cluster.rpc import Request
from geomx_cli.ps.delivery._dgt_delivery import DgtWorker

ORDERED = {"ENABLE_DGT": "2", "GEOMX_DELIVERY": "dgt"}
DATAGRAMS = {"ENABLE_DGT": "1", "GEOMX_DELIVERY": "dgt"}
PATIENT = {"GEOMX_DGT_WAIT": "40"}
"""Where nothing is lost, a slow machine must not make blocks late."""
SLICE, BLOCK = 20_000, 1024
"""Elements: of the longest slice in scripts/rounds.py's jobs, and of a block."""


def datagrams(directory: Path, process: str) -> dict[str, int]:
    """The newest telemetry of a process about datagrams."""
    lines = (directory / "events" / f"{process}.jsonl").read_text().splitlines()
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [event["datagrams"] for event in found if event["event"] == "telemetry" and "datagrams" in event][-1]


def log_events(cluster: Cluster, directory: Path) -> dict[str, str]:
    cluster.each |= {name: {"GEOMX_PROCESS": name} for name in ("root0", "Asrv0", "Bsrv0")}
    return {"GEOMX_JOB_DIR": str(directory)}


@pytest.mark.parametrize(("roots", "shuffle"), [(1, "1"), (3, "2")])
def test_reordered_blocks_give_the_same_bits(cluster: Cluster, tmp_path: Path, roots: int, shuffle: str) -> None:
    found = run(cluster, tmp_path, {**ORDERED, "SHUFFLE": shuffle}, roots=roots)
    assert len(found) == 4
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 5), optimizer=True))


def test_datagrams_without_loss_give_the_same_bits(cluster: Cluster, tmp_path: Path) -> None:
    found = run(cluster, tmp_path, {**DATAGRAMS, **PATIENT, **log_events(cluster, tmp_path), "ROUNDS": "40"}, roots=1)
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 40), optimizer=True))
    root, local = datagrams(tmp_path, "root0"), datagrams(tmp_path, "Asrv0")
    assert root["received"] > 20 * 2 * 4 * 8 * 4096 and not root["missing"] and local["sent"] > root["received"] / 2


def test_all_blocks_are_sent_reliably_while_no_datagram_arrives(cluster: Cluster, tmp_path: Path) -> None:
    env = {**DATAGRAMS, **log_events(cluster, tmp_path), "GEOMX_DGT_LOSS": "1", "ROUNDS": "30", "SLOW": "0.05"}
    found = run(cluster, tmp_path, env)
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 30), optimizer=True))
    assert "no datagrams reach root0, so all blocks are sent reliably" in cluster.output("Asrv0")
    assert datagrams(tmp_path, "Asrv0")["sent"] and not datagrams(tmp_path, "root0")["received"]


def important(members: list[int], rounds: int, size: int) -> np.ndarray:
    """Which elements of tensor 0 are in important blocks of this party's sum in the last round."""
    found = np.zeros(size, bool)
    for piece in Partition(SLICE, 1).declare(Tensor("t0", size, "float32")).slices:
        start, length = piece.offset, piece.length
        blocks = range(start, start + length, BLOCK)
        average = np.zeros(len(blocks))
        for number in range(rounds):
            total = sum(gradient(rank, number, size, 0) for rank in members)
            magnitude = np.abs(total.astype(np.float64))
            mean = [magnitude[at : min(at + BLOCK, start + length)].mean() for at in blocks]
            average = 0.3 * average + 0.7 * np.array(mean)
        best = sorted(range(len(blocks) - 1), key=lambda at: -average[at])[: int(0.5 * len(blocks) + 0.5)]
        for at in [*best, len(blocks) - 1]:
            found[blocks[at] : min(blocks[at] + BLOCK, start + length)] = True
    return found


@pytest.mark.parametrize("loss", [0.05, 0.2])
def test_important_blocks_are_exact_though_others_are_lost(cluster: Cluster, tmp_path: Path, loss: float) -> None:
    rounds, size = 30, 70_000
    env = {**DATAGRAMS, **log_events(cluster, tmp_path), "GEOMX_DGT_LOSS": str(loss), "SERVER_OPTIMIZER": ""}
    found = run(cluster, tmp_path, {**env, "ROUNDS": str(rounds)}, roots=1)
    root = datagrams(tmp_path, "root0")
    assert root["received"] and root["missing"] > 0 and not root["late"]
    assert 0.5 * loss < root["missing"] / (root["missing"] + root["received"]) < 2 * loss
    parties = [sum(gradient(rank, rounds - 1, size, 0) for rank in members) for members in ([0, 1], [2, 3])]
    exact = [important(members, rounds, size) for members in ([0, 1], [2, 3])]
    for arrays in found.values():
        assert arrays[0].tobytes() == found[0][0].tobytes()
    got = found[0][0]
    total = parties[0] + parties[1]
    assert np.array_equal(got[exact[0] & exact[1]], total[exact[0] & exact[1]])
    # What is not exact lacks one party's block, or both.
    lacks = [total, np.where(exact[0], np.nan, parties[1]), np.where(exact[1], np.nan, parties[0]), total * 0]
    assert np.any([got == other for other in lacks], axis=0).all()
    assert_equal({0: found[0][1:]}, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), rounds), optimizer=False)[1:])


@pytest.mark.parametrize(("mode", "ahead"), [("1", FAR), ("2", AHEAD)])
def test_every_round_is_right_though_links_are_cut(cluster: Cluster, tmp_path: Path, mode: str, ahead: int) -> None:
    check_rounds(cluster, tmp_path, 3, "all", False, 0, ahead, ENABLE_DGT=mode, DGT_BLOCK_SIZE="256", **PATIENT)


@pytest.mark.parametrize("mode", ["1", "2"])
def test_no_order_of_pushes_blocks(cluster: Cluster, tmp_path: Path, mode: str) -> None:
    """Windows hold less than the important blocks of all slices, and members push in different orders."""
    sizes, rounds = (3_000, 2_000, 3_000, 5_000), 12
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "SIZES": ",".join(map(str, sizes)), "ROUNDS": str(rounds),
        "AHEAD": str(rounds), "BY_KEY": "1", "SERVER_OPTIMIZER": "1", "GEOMX_WINDOW": "4096",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024", "ENABLE_DGT": mode, "DGT_BLOCK_SIZE": "256", **PATIENT,
    }  # fmt: skip
    cluster.launch(IN_FLIGHT, roots=3)
    cluster.finish()
    check_results(tmp_path, expected_in_flight(True, sizes, rounds))


def test_workers_report_their_loss_and_fewer_blocks_are_important(cluster: Cluster, tmp_path: Path) -> None:
    """The loss falls to a tenth: k from 0.8 to 0.2. Nothing else changes."""
    env = {**DATAGRAMS, **PATIENT, **log_events(cluster, tmp_path), "DMLC_K": "0.8", "ROUNDS": "24"}
    run(cluster, tmp_path, env)
    many = datagrams(tmp_path, "root0")["received"]
    found = run(cluster, tmp_path, {**env, "ADAPTIVE_K_FLAG": "1", "LOSS": "1"})
    assert datagrams(tmp_path, "root0")["received"] > 2 * many
    assert_equal(found, expected([[0, 1], [2, 3]], dict.fromkeys(range(4), 24), optimizer=True))


def test_with_a_sparse_codec_the_tensors_that_it_leaves_dense_are_divided(cluster: Cluster, tmp_path: Path) -> None:
    """Those that it encodes are sent whole: the same bits as without DGT, also where blocks are quantised."""
    found = {}
    for mode in ("0", "2", "3"):
        delivery = {"ENABLE_DGT": mode, "GEOMX_DELIVERY": "dgt"} if mode != "0" else {}
        env = {**delivery, "GEOMX_COMPRESS": "bsc:0.1,min=50000", "SERVER_OPTIMIZER": "", "SIZES": "70000,40000"}
        (folder := tmp_path / mode).mkdir()
        found[mode] = run(cluster, folder, {**env, "ROUNDS": "6"}, roots=1)[0]
        cluster.stop()
    sparse, dense = zip(*(found[mode] for mode in ("0", "2", "3")), strict=True)
    assert 0 < np.count_nonzero(sparse[0]) < 0.25 * 70_000 and np.count_nonzero(dense[0]) > 0.99 * 40_000
    assert np.array_equal(sparse[0], sparse[1]) and np.array_equal(sparse[0], sparse[2])
    assert np.array_equal(dense[0], dense[1])
    assert np.mean(dense[0] != dense[2]) > 0.1 and np.corrcoef(dense[0], dense[2])[0, 1] > 0.95


def test_servers_know_the_loss_of_workers_whose_contributions_others_bring() -> None:
    """As with --tsengine; each value once, and none that is no number."""
    settings = NodeSettings(options={**defaults(plugins.table()), "dgt_adaptive": True, "heartbeat": 0.02})
    told: list[float] = []

    def take(request: Request) -> None:
        told.append(request.body["loss"])
        request.answer()

    (port,) = free_ports(1)
    above = Node(settings, EventLog(None), on_tensor=lambda *_: None, on_request=take)
    below = Node(settings, EventLog(None), on_tensor=lambda *_: None, on_request=lambda _: None)
    above.transport.listen((f"tcp://127.0.0.1:{port}",))
    upstream = UpstreamClient()
    DgtWorker().begin(below, upstream, {})
    upstream.links.append(below.transport.dial(f"tcp://127.0.0.1:{port}", "above", wide_area=False))
    threads = [threading.Thread(target=node.loop.run) for node in (above, below)]
    for thread in threads:
        thread.start()
    for loss in (2.0, float("nan"), 1.5):
        below.telemetry.loss = loss
        until(lambda loss=loss: loss in told or np.isnan(loss))
    for node, thread in zip((above, below), threads, strict=True):
        node.loop.submit(node.loop.stop)
        thread.join()
        node.close()
    assert told == [2.0, 1.5]
