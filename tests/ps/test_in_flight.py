"""Several rounds of each key in flight while connections are cut: every worker gets the result of every round."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cluster import ROOT, Cluster, free_ports
from test_cuts import Proxy
from test_exact import gradient, initial

SCRIPT = [sys.executable, str(ROOT / "tests/scripts/in_flight.py")]
SIZES, ROUNDS, ROW, CUTS = (3_000, 700, 5), 100, 5, 300


def expected(
    optimizer: bool, sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS,
    crossed: Callable[[np.ndarray], np.ndarray] = lambda array: array,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The result of each round of each tensor, for parties of two workers."""
    results = {}
    for index, size in enumerate(sizes):
        weight, momentum = initial(size, index), np.zeros(size, np.float32)
        for number in range(rounds):
            a0, a1, b0, b1 = (gradient(rank, number, size, index) for rank in range(4))
            total = crossed(a0 + a1) + crossed(b0 + b1)
            momentum = np.float32(0.9) * momentum - np.float32(0.1) * (np.float32(0.25) * total)
            weight = weight + momentum
            results[f"{number}-{index}"] = crossed(weight if optimizer else total)
    return results


def expected_of_rows(optimizer: bool) -> dict[str, np.ndarray]:
    """Like `expected`, where each worker pushes every third row; the optimizer changes only pushed rows."""
    results = {}
    for index, size in enumerate(SIZES):
        weight, momentum = initial(size, index).reshape(-1, ROW), np.zeros((size // ROW, ROW), np.float32)
        for number in range(ROUNDS):
            parts = [np.zeros_like(weight) for _ in range(4)]
            hit = np.zeros(len(weight), bool)
            for rank, part in enumerate(parts):
                mine = slice((rank + number) % 3, None, 3)
                part[mine] = gradient(rank, number, size, index).reshape(-1, ROW)[mine]
                hit[mine] = True
            total = (parts[0] + parts[1]) + (parts[2] + parts[3])
            new = np.float32(0.9) * momentum - np.float32(0.1) * (np.float32(0.25) * total)
            momentum = np.where(hit[:, None], new, momentum)
            weight = np.where(hit[:, None], weight + momentum, weight)
            results[f"{number}-{index}"] = (weight if optimizer else total).reshape(-1)
    return results


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "sums"])
def test_every_round_of_rows_has_its_own_result(cluster: Cluster, tmp_path: Path, optimizer: bool) -> None:
    """A pull after a push of rows returns the rows of that round, though later rounds have begun."""
    check_rounds(cluster, tmp_path, 3, "both", optimizer, ROW)


@pytest.mark.parametrize(
    ("cut", "roots", "optimizer", "ahead"),
    [("both", 1, False, 90), ("above", 3, True, 12), ("both", 3, True, 90)],
)
def test_every_round_has_its_own_result(
    cluster: Cluster, tmp_path: Path, cut: str, roots: int, optimizer: bool, ahead: int
) -> None:
    """Links of local servers to global servers, or all, are cut some hundred times; also with more rounds begun than
    may be in flight.
    """
    check_rounds(cluster, tmp_path, roots, cut, optimizer, 0, ahead)


def check_rounds(
    cluster: Cluster, tmp_path: Path, roots: int, cut: str, optimizer: bool, row: int, ahead: int = 12,
    crossed: Callable[[np.ndarray], np.ndarray] = lambda array: array, **env: str,
) -> None:  # fmt: skip
    """Run the job while links are cut, and compare each worker's result of each round; `row` 0: dense ones. crossed:
    the conversion of an array between a party and the global servers. The first workers of both parties listen if the
    delivery needs it; cut "beside" breaks connections dialled to them.
    """
    names = [*(f"root{rank}" for rank in range(roots)), "Asrv0", "Bsrv0", "Aw0", "Bw0"]
    near, far = free_ports(len(names)), free_ports(len(names))
    for name, front, port in zip(names, near, far, strict=True):
        cluster.each[name] = {
            "GEOMX_BIND": f"tcp://127.0.0.1:{port}", "GEOMX_ADVERTISE": f"tcp://127.0.0.1:{front}",
            "GEOMX_PROCESS": name,
        }  # fmt: skip
    for name in ("Aw0", "Aw1", "Bw0", "Bw1"):
        cluster.each.setdefault(name, {})["GEOMX_RANK"] = name[-1]
    routes = list(zip(near, far, strict=True))
    above, below, beside = (Proxy(dict(part)) for part in (routes[:roots], routes[roots:-2], routes[-2:]))
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"),
        "SIZES": ",".join(map(str, SIZES)),
        "ROUNDS": str(ROUNDS),
        "AHEAD": str(ahead),
        "PAUSE": "0.04",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024",
        **({"SERVER_OPTIMIZER": "1"} if optimizer else {}),
        **({"ROW": str(row)} if row else {}),
        **env,
    }
    cluster.launch(SCRIPT, roots=roots)
    chosen = {
        "below": [below], "above": [above], "both": [below, above], "beside": [beside], "all": [below, above, beside],
    }[cut]  # fmt: skip
    pauses, end = random.Random(roots), time.monotonic() + 50
    while (
        any(process.poll() is None for process in cluster.processes.values())
        and sum(proxy.cuts for proxy in chosen) < CUTS
        and time.monotonic() < end
    ):
        time.sleep(pauses.random() * 0.05)
        for proxy in chosen:
            proxy.cut(chance=0.4)
    cluster.finish()
    assert sum(proxy.cuts for proxy in chosen) > 20
    check_results(tmp_path, expected_of_rows(optimizer) if row else expected(optimizer, crossed=crossed))


def test_no_order_of_pushes_blocks(cluster: Cluster, tmp_path: Path) -> None:
    """Windows of two slices; each worker begins twenty rounds of one key before those of the next, in a different
    order: the contents of each window wait for messages queued behind other windows.
    """
    sizes, rounds = (3_000, 2_000, 3_000, 5_000), 20
    cluster.environment = {
        "OUT": str(tmp_path / "w{rank}.npz"), "SIZES": ",".join(map(str, sizes)), "ROUNDS": str(rounds),
        "AHEAD": str(rounds), "BY_KEY": "1", "SERVER_OPTIMIZER": "1", "GEOMX_WINDOW": "8192",
        "MXNET_KVSTORE_BIGARRAY_BOUND": "1024",
    }  # fmt: skip
    cluster.launch(SCRIPT, roots=3)
    cluster.finish()
    check_results(tmp_path, expected(True, sizes, rounds))


def check_results(tmp_path: Path, wanted: dict[str, np.ndarray]) -> None:
    """Compare the results that each worker has saved for each round."""
    for rank in range(4):
        found = np.load(tmp_path / f"w{rank}.npz")
        wrong = [name for name, array in wanted.items() if found[name].tobytes() != array.tobytes()]
        assert not wrong, f"worker {rank}: {len(wrong)} of {len(wanted)} results are wrong: {wrong[:20]}"
