"""The results of scripts/averages.py in HFA, computed in one process."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from cluster import ROOT

from geomx_cli.ps.arrays import Array

SCRIPT = [sys.executable, str(ROOT / "tests/scripts/averages.py")]
SIZES = (5000, 10, 3)


def own_steps(weight: Array, rank: int, number: int, index: int, steps: int = 2) -> Array:
    goal = np.random.default_rng([rank, number, index]).standard_normal(weight.size).astype(weight.dtype)
    for _ in range(steps):
        weight = weight - weight.dtype.type(0.25) * (weight - goal)
    return weight


def expected(
    parties: Sequence[Sequence[int]], rounds: Mapping[int, int], k2: int, *, index: int = 0, size: int = 8,
    dtype: str = "float32", counts: Mapping[int, float] | None = None,
) -> dict[int, list[Array]]:  # fmt: skip
    """Each worker's result after each of its rounds; `parties` are global ranks, `counts` each worker's samples.

    A mean is over the remaining members. fp16 is averaged in fp32, and rounded where it is sent to workers or stored.
    """
    kind, work = np.dtype(dtype), np.dtype("float64" if dtype == "float64" else "float32")
    milestone = np.random.default_rng(1000 + index).standard_normal(size).astype(kind)
    history = {rank: [milestone] for party in parties for rank in party}
    value, since = milestone.astype(work), dict.fromkeys(range(len(parties)), 0.0)
    for number in range(max(rounds.values())):
        given, total_weight, there = None, 0.0, []
        for which, party in enumerate(parties):
            members = [rank for rank in party if number < rounds[rank]]
            if not members:
                continue
            weights = [counts[rank] if counts else 1.0 for rank in members]
            shares = [
                own_steps(history[rank][-1], rank, number, index) * kind.type(weight / len(party))
                for rank, weight in zip(members, weights, strict=True)
            ]
            mean = sum_of(shares, work)
            if sum(weights) != len(party):
                mean = mean * work.type(len(party) / sum(weights))
            since[which] += sum(weights)
            if (number + 1) % k2:
                for rank in members:
                    history[rank].append(mean.astype(kind))
                continue
            weight, since[which] = since[which] if counts else 1.0, 0.0
            difference = (mean - value.astype(kind).astype(work)) * work.type(weight)
            given = sum_of([difference] if given is None else [given, difference], work)
            total_weight += weight
            there += members
        if given is not None:
            value = (value.astype(kind) + given / work.type(total_weight)).astype(kind).astype(work)
            for rank in there:
                history[rank].append(value.astype(kind))
    return history


def sum_of(arrays: Sequence[Array], work: np.dtype) -> Array:
    total = arrays[0].astype(work)
    for array in arrays[1:]:
        total = total + array.astype(work)
    return total


def found_in(folder: Path, tensor: str = "t0") -> dict[int, list[Array]]:
    return {int(path.stem[1:]): list(np.load(path)[tensor]) for path in sorted(folder.glob("w*.npz"))}
