"""Jobs of scripts/in_flight.py while links are cut, and the result of each round, computed in one process."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cluster import ROOT, Cluster, free_ports
from proxy import Proxy
from rounds import gradient, initial

SCRIPT = [sys.executable, str(ROOT / "tests/scripts/in_flight.py")]
SIZES, ROUNDS, ROW, CUTS = (3_000, 700, 5), 30, 5, 300
AHEAD, FAR = 12, 90
"""Rounds of a key begun before the first has ended. FAR, which needs more rounds, is more than may be in flight."""


def expected(
    optimizer: bool, sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS,
    crossed: Callable[[np.ndarray], np.ndarray] = lambda array: array,
    pushed: Callable[[np.ndarray], np.ndarray] = lambda array: array,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The result of each round of each tensor, for parties of two workers. pushed: the conversion of an array between a
    worker and its local server; crossed: see check_rounds.
    """
    results = {}
    for index, size in enumerate(sizes):
        weight, momentum = initial(size, index), np.zeros(size, np.float32)
        for number in range(rounds):
            a0, a1, b0, b1 = (pushed(gradient(rank, number, size, index)) for rank in range(4))
            total = crossed(a0 + a1) + crossed(b0 + b1)
            momentum = np.float32(0.9) * momentum - np.float32(0.1) * (np.float32(0.25) * total)
            weight = weight + momentum
            results[f"{number}-{index}"] = pushed(crossed(weight if optimizer else total))
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


def check_rounds(
    cluster: Cluster, tmp_path: Path, roots: int, cut: str, optimizer: bool, row: int, ahead: int = AHEAD,
    crossed: Callable[[np.ndarray], np.ndarray] = lambda array: array, wanted: dict[str, np.ndarray] | None = None,
    **env: str,
) -> None:  # fmt: skip
    """Run the job while links are cut, each some ten times a round, and compare each worker's result of each round;
    `row` 0: dense ones. crossed: the conversion of an array between a party and the global servers. wanted: the results
    if they are others. The first workers of both parties listen if the delivery needs it; cut "beside" breaks
    connections dialled to them.
    """
    rounds = ROUNDS if ahead < ROUNDS else ahead + 10
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
        "ROUNDS": str(rounds),
        "AHEAD": str(ahead),
        "PAUSE": str(4 / rounds),
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
    assert sum(proxy.cuts for proxy in chosen) > 2 * ROUNDS
    if wanted is None:
        wanted = expected_of_rows(optimizer) if row else expected(optimizer, rounds=rounds, crossed=crossed)
    check_results(tmp_path, wanted)


def check_results(tmp_path: Path, wanted: dict[str, np.ndarray]) -> None:
    """Compare the results that each worker has saved for each round."""
    for rank in range(4):
        found = np.load(tmp_path / f"w{rank}.npz")
        wrong = [name for name, array in wanted.items() if found[name].tobytes() != array.tobytes()]
        assert not wrong, f"worker {rank}: {len(wrong)} of {len(wanted)} results are wrong: {wrong[:20]}"
