"""TSEngine when relays die, stop or cannot be reached: sums are right, and nothing hangs or counts twice."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from cluster import Cluster, free_ports, until
from forced_relays import BY_HAND, launch_planned, relayed
from in_flight import SCRIPT, SIZES, check_results, check_rounds, expected
from proxy import Proxy
from rounding import rounded
from rounds import gradient, initial

SERVERS, WORKERS = ("Asrv0", "Bsrv0"), ("Aw0", "Aw1", "Bw0", "Bw1")
RELAYS = {"inter": "Asrv0", "intra": "Aw0"}
"""The relay, by the level, with THROUGH=1:0."""
SENDERS = {"inter": "Bsrv0", "intra": "Aw1"}
ROUNDS = 30
WHERE_AND_WHEN = [("inter", "taken"), ("inter", "answered"), ("intra", "taken"), ("intra", "answered")]

pytestmark = pytest.mark.processes


def launch(
    cluster: Cluster, tmp_path: Path, level: str, each: Mapping[str, Mapping[str, str]] = {}, **env: str
) -> None:
    """Two parties of two workers, with twelve rounds of three keys in flight; those of rank 1 send through rank 0."""
    for name in (*SERVERS, *WORKERS, "root0"):
        rank = {"GEOMX_RANK": name[-1]} if name in WORKERS else {}
        party = {"GEOMX_PARTY": name[0]}
        cluster.each[name] = {"GEOMX_PROCESS": name, **party, **rank, **each.get(name, {})}
    cluster.environment = {
        **BY_HAND, "THROUGH": "1:0", "GEOMX_FORCED": level, "OUT": str(tmp_path / "w{rank}.npz"), "AHEAD": "12",
        "SIZES": ",".join(map(str, SIZES)), "ROUNDS": str(ROUNDS), "SERVER_OPTIMIZER": "1", "PAUSE": "0.04",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024", "GEOMX_JOB_DIR": str(tmp_path), "GEOMX_HEARTBEAT": "0.2",
        "EVENTS": "1", **env,
    }  # fmt: skip
    cluster.launch(SCRIPT)


def behind_proxy(level: str) -> tuple[Proxy, dict[str, str]]:
    """A proxy before the relay, for its peers only, and the variables of the relay."""
    port, front = free_ports(2)
    # A process of its own party dials the first address of a local server, others the last.
    near = f"tcp://127.0.0.1:{port} " * (level == "inter")
    address = {"GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_ADVERTISE": f"{near}tcp://127.0.0.1:{front}"}
    return Proxy({front: port}), address


@pytest.mark.parametrize(("level", "point"), WHERE_AND_WHEN[::3])
def test_a_relay_that_dies_ends_the_job_with_its_name(cluster: Cluster, tmp_path: Path, level: str, point: str) -> None:
    """With contributions of a peer that it has not sent on, or results that it has not passed on. Its own party, or
    worker, cannot be done without. Every result until then is right.
    """
    relay = RELAYS[level]
    launch(cluster, tmp_path, level, RELAY_FAULT=f"{relay} {point} 60 KILL")
    statuses = cluster.wait()
    assert statuses.pop(relay) == -signal.SIGKILL
    told = [name for name in (*SERVERS, *WORKERS, "root0") if name != relay]
    for name in told:
        assert statuses[name] > 0 and f"{relay} has been gone" in cluster.output(name), cluster.outputs()
    wanted = expected(True, rounds=ROUNDS)
    ended = 0
    for rank, name in enumerate(WORKERS):
        if name == relay:
            continue
        found = np.load(tmp_path / f"w{rank}.npz")
        ended += len(found)
        wrong = [which for which in found if found[which].tobytes() != wanted[which].tobytes()]
        assert not wrong, f"{name}: {wrong} of {len(found)}"
    assert ended > 20


def test_the_job_of_four_parties_ends_when_a_relay_dies(cluster: Cluster, tmp_path: Path, installed: None) -> None:
    """With three rounds of twenty keys in flight, and two parties that send through a third."""
    sizes = [200 + 10 * index for index in range(20)]
    launch_planned(
        cluster, 4, "1:0 2:0", 30, {"workers": 1}, script=SCRIPT, AHEAD="3", PAUSE="0.02",
        SIZES=",".join(map(str, sizes)), RELAY_FAULT="A/server:0 taken 400 KILL",
    )  # fmt: skip
    statuses = cluster.wait()
    assert statuses.pop("A-server-0") == -signal.SIGKILL and all(statuses.values())
    assert "A/server:0 has been gone" in cluster.output("central-global_server-0"), cluster.outputs()
    compared = 0
    for index, size in enumerate(sizes):
        weight, momentum = initial(size, index), np.zeros(size, np.float32)
        results = []
        for number in range(20):
            total = sum(gradient(rank, number, size, index) for rank in range(4))
            momentum = np.float32(0.9) * momentum - np.float32(0.1) * (np.float32(0.25) * total)
            weight = weight + momentum
            results.append(weight)
        for rank in range(4):
            found = np.load(tmp_path / f"w{rank}.npz")
            for number, result in enumerate(results):
                if f"{number}-{index}" in found:
                    np.testing.assert_allclose(found[f"{number}-{index}"], result, rtol=0, atol=2e-5)
                    compared += 1
    assert compared > 4 * len(sizes)


@pytest.mark.parametrize(("level", "point"), WHERE_AND_WHEN[1:3])
def test_a_stopped_relay_is_gone_around_and_nothing_counts_twice(
    cluster: Cluster, tmp_path: Path, level: str, point: str
) -> None:
    """It stops with contributions, or results, that it has not passed on, and continues when these were asked for
    elsewhere: then it passes them on too.
    """
    relay, sender = RELAYS[level], SENDERS[level]
    launch(cluster, tmp_path, level, RELAY_FAULT=f"{relay} {point} 40 STOP")
    stopped = cluster.processes[relay].pid
    until(lambda: Path(f"/proc/{stopped}/stat").read_text().rpartition(")")[2].split()[0] == "T", 30, cluster.outputs)
    try:
        until(lambda: relayed(cluster, sender, "rerouted"), state=cluster.outputs)
    finally:
        os.kill(stopped, signal.SIGCONT)
    cluster.finish()
    check_results(tmp_path, expected(True, rounds=ROUNDS))


@pytest.mark.parametrize("level", RELAYS)
def test_a_refusal_that_is_lost_with_a_connection_holds_up_nothing(
    cluster: Cluster, tmp_path: Path, level: str
) -> None:
    """The sender asks the server once the link to the relay has a new connection, not because the relay is silent."""
    relay, sender, lost = RELAYS[level], SENDERS[level], tmp_path / "lost"
    proxy, address = behind_proxy(level)
    each = {relay: address, sender: {"LOSES": str(lost)}}
    launch(cluster, tmp_path, level, each, RELAY_FAULT=f"{relay} refused 20 -", DEAD="1000")
    until(lost.exists, state=cluster.outputs)
    proxy.cut()
    cluster.finish()
    check_results(tmp_path, expected(True, rounds=ROUNDS))


@pytest.mark.parametrize("level", RELAYS)
def test_a_relay_that_waits_in_vain_learns_so_when_it_asks(cluster: Cluster, tmp_path: Path, level: str) -> None:
    """It was not told, or that was lost, that the contribution goes another way."""
    launch(cluster, tmp_path, level, RELAY_FAULT=f"{RELAYS[level]} refused 20 -", LONGEST="1000")
    cluster.finish()
    check_results(tmp_path, expected(True, rounds=ROUNDS))


@pytest.mark.parametrize("level", RELAYS)
def test_a_link_between_peers_that_stays_cut_is_gone_around(cluster: Cluster, tmp_path: Path, level: str) -> None:
    """The one to the relay, with contributions on their way; the job needs it no more."""
    relay, sender = RELAYS[level], SENDERS[level]
    proxy, address = behind_proxy(level)
    launch(cluster, tmp_path, level, {relay: address})
    until(lambda: relayed(cluster, relay, "received"), state=cluster.outputs)
    with proxy.losing():
        until(lambda: relayed(cluster, sender, "rerouted"), state=cluster.outputs)
        cluster.finish()
    check_results(tmp_path, expected(True, rounds=ROUNDS))


@pytest.mark.parametrize(
    ("level", "cut", "roots", "through"),
    [
        ("inter", "below", 1, "1:0"), ("inter", "above", 3, "0:1"), ("inter", "both", 1, "0:1"),
        ("intra", "all", 1, "0:1"), ("intra", "beside", 1, "1:0"),
    ],
)  # fmt: skip
def test_every_round_is_right_though_links_are_cut(
    cluster: Cluster, tmp_path: Path, level: str, cut: str, roots: int, through: str
) -> None:
    """Those between peers too: contributions and results on their way are lost."""
    check_rounds(cluster, tmp_path, roots, cut, True, 0, **BY_HAND, THROUGH=through, GEOMX_FORCED=level)


@pytest.mark.parametrize(("mode", "through"), [("1", "0:1"), ("2", "1:0")])
def test_every_round_is_right_with_dgt_though_links_are_cut(
    cluster: Cluster, tmp_path: Path, mode: str, through: str
) -> None:
    """What goes to the servers directly, at first and after each cut, goes in blocks."""
    dgt = {"ENABLE_DGT": mode, "DGT_BLOCK_SIZE": "256", "GEOMX_DGT_WAIT": "40"}
    check_rounds(cluster, tmp_path, 2, "both", True, 0, **BY_HAND, **dgt, THROUGH=through)


def test_every_round_of_encoded_values_is_right_though_links_are_cut(cluster: Cluster, tmp_path: Path) -> None:
    """What is passed on alone is lost and sent again, too."""
    env = {**BY_HAND, "THROUGH": "1:0", "GEOMX_COMPRESS": "fp16"}
    check_rounds(cluster, tmp_path, 2, "both", True, 0, crossed=lambda array: rounded(array, 11), **env)
