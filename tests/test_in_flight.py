"""Several rounds of each key under way while connections are cut: every worker gets the result of every round."""

import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cluster import ROOT, Cluster, free_ports
from test_cuts import Proxy
from test_exact import gradient, initial

SCRIPT = [sys.executable, str(ROOT / "tests/scripts/in_flight.py")]
SIZES, ROUNDS = (3_000, 700, 5), 120


def expected(optimizer: bool) -> dict[str, np.ndarray]:
    """What each round of each tensor comes to, for parties of two workers."""
    results = {}
    for index, size in enumerate(SIZES):
        weight, momentum = initial(size, index), np.zeros(size, np.float32)
        for number in range(ROUNDS):
            a0, a1, b0, b1 = (gradient(rank, number, size, index) for rank in range(4))
            total = (a0 + a1) + (b0 + b1)
            momentum = np.float32(0.9) * momentum - np.float32(0.1) * (np.float32(0.25) * total)
            weight = weight + momentum
            results[f"{number}-{index}"] = weight if optimizer else total
    return results


@pytest.mark.parametrize("cut", ["below", "above", "both"])
@pytest.mark.parametrize("roots", [1, 3])
@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "sums"])
def test_every_round_has_its_own_result(
    cluster: Cluster, tmp_path: Path, roots: int, cut: str, optimizer: bool
) -> None:
    """Links of workers to local servers, of those to global servers, or both are cut some hundred times."""
    names = [*(f"root{rank}" for rank in range(roots)), "Asrv0", "Bsrv0"]
    near, far = free_ports(len(names)), free_ports(len(names))
    for name, front, port in zip(names, near, far, strict=True):
        cluster.each[name] = {
            "GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_ADVERTISE": f"tcp://127.0.0.1:{front}",
            "GEOMX_PROCESS": name,
        }  # fmt: skip
    routes = dict(zip(near, far, strict=True))
    local = {front: routes[front] for front in near[roots:]}
    above = {front: routes[front] for front in near[:roots]}
    proxies = [Proxy(local), Proxy(above)]
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"),
        "SIZES": ",".join(map(str, SIZES)),
        "ROUNDS": str(ROUNDS),
        "AHEAD": "12",
        "PAUSE": "0.06",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024",
        **({"SERVER_OPTIMIZER": "1"} if optimizer else {}),
    }
    cluster.launch(SCRIPT, roots=roots)
    chosen = {"below": proxies[:1], "above": proxies[1:], "both": proxies}[cut]
    pauses, end = random.Random(roots), time.monotonic() + 50
    while any(process.poll() is None for process in cluster.processes.values()) and time.monotonic() < end:
        time.sleep(pauses.random() * 0.05)
        for proxy in chosen:
            proxy.cut(chance=0.4)
    cluster.finish()
    assert sum(proxy.cuts for proxy in chosen) > 20
    wanted = expected(optimizer)
    for rank in range(4):
        found = np.load(tmp_path / f"w{rank}.npz")
        wrong = [name for name, array in wanted.items() if found[name].tobytes() != array.tobytes()]
        assert not wrong, f"worker {rank}: {len(wrong)} of {len(wanted)} results are wrong: {wrong[:20]}"
