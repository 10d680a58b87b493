"""Decoupled DiLoCo's merges, against numpy: quorum, late differences, directions, and what is kept at the end."""

import random

import numpy as np
import pytest
from tree import Tree

from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.algorithms.decoupled import MEMORY, DecoupledServer

RATE = 0.5
SAME = np.array([3, 4, 0, 0, 0, 0, 0, 0], np.float32)
"""Of length 5."""
OTHER = np.array([0, 0, 5, 12, 0, 0, 0, 0], np.float32)
"""Of length 13, and perpendicular to SAME."""


def tree(parties: int, quorum: int) -> Tree:
    made = Tree([1] * parties, lambda *_: DecoupledServer(quorum)).use("sgd", learning_rate=RATE)
    made.init(np.zeros(8, np.float32))
    return made


def value(job: Tree) -> Array:
    found: Array = job.roots[0].rounds.table.entries[0, 0].value
    return found


def merged(given: list[tuple[Array, float]], share: float) -> Array:
    """The outer step of these differences with their weights."""
    lengths, weights = [np.linalg.norm(array) for array, _ in given], [weight for _, weight in given]
    direction = sum(weight * array / length for (array, weight), length in zip(given, lengths, strict=True))
    return RATE * share * np.average(lengths, weights=weights) * direction / np.linalg.norm(direction)


def test_nobody_waits_and_the_quorum_merges() -> None:
    job = tree(3, 2)
    job.push((0, 0), 1, SAME)
    assert (job.last((0, 0)) == 0).all(), "it is answered at once, without its own difference"
    job.push((1, 0), 1, OTHER)
    np.testing.assert_allclose(job.last((1, 0)), -merged([(SAME, 1), (OTHER, 1)], 1), rtol=1e-6)
    assert [result.version for party in (0, 1) for result in job.got((party, 0))] == [0, 1]
    assert not job.got((2, 0))


def test_opposite_directions_do_not_shorten_a_merge() -> None:
    """The lengths have a mean of their own."""
    job = tree(2, 2)
    job.push((0, 0), 1, SAME)
    job.push((1, 0), 1, OTHER)
    assert np.linalg.norm(value(job)) == pytest.approx(RATE * 9)
    job.push((0, 0), 2, SAME)
    job.push((1, 0), 2, -SAME)
    assert np.linalg.norm(value(job)) == pytest.approx(RATE * 9), "they have no direction"


def test_a_party_that_gives_its_next_difference_waits_for_no_quorum() -> None:
    """The other parties are dead."""
    job = tree(4, 3)
    for number in range(1, 4):
        job.push((0, 0), number, SAME)
        np.testing.assert_allclose(job.last((0, 0)), -RATE * SAME * (number - 1), rtol=1e-6)


def test_a_late_difference_counts_less_and_a_party_that_has_been_away_is_no_share() -> None:
    job, rounds = tree(3, 2), 2 + MEMORY
    expected = -merged([(SAME, 1), (OTHER, 1)], 1)
    job.push((2, 0), 1, OTHER)
    job.push((0, 0), 1, SAME)
    for number in range(2, rounds):
        job.push((0, 0), number, SAME)
        job.push((1, 0), number - 1, SAME)
        present = 3 if number <= MEMORY else 2
        expected = expected - merged([(SAME, 1), (SAME, 1)], 2 / present)
        np.testing.assert_allclose(value(job), expected, rtol=1e-5)
    job.push((2, 0), 2, OTHER)
    job.push((0, 0), rounds, SAME)
    expected = expected - merged([(OTHER, 1 / (rounds - 1)), (SAME, 1)], 2 / 3)
    np.testing.assert_allclose(value(job), expected, rtol=1e-5)


def test_what_is_kept_is_merged_when_a_party_has_ended() -> None:
    job = tree(3, 3)
    job.push((0, 0), 1, SAME)
    job.push((1, 0), 1, OTHER)
    assert (value(job) == 0).all()
    job.push((1, 0), 2, None)
    np.testing.assert_allclose(job.last((1, 0)), -merged([(SAME, 1), (OTHER, 1)], 1), rtol=1e-6)
    before = value(job)
    job.push((0, 0), 2, None)
    assert value(job) is before, "nothing is kept"


def test_a_difference_that_is_zero_moves_nothing() -> None:
    job = tree(2, 2)
    job.push((0, 0), 1, np.zeros(8, np.float32))
    job.push((1, 0), 1, np.zeros(8, np.float32))
    assert (value(job) == 0).all() and len(job.got((0, 0))) == len(job.got((1, 0))) == 1
    job.push((0, 0), 2, np.zeros(8, np.float32))
    job.push((1, 0), 2, SAME)
    np.testing.assert_allclose(value(job), -RATE * SAME / 2, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_each_difference_is_in_one_merge(seed: int) -> None:
    """In any order. All have one direction, so the way is the sum of the merges' means."""
    job, draw, rounds = tree(4, 3), random.Random(seed), [0] * 4
    kept: list[tuple[int, float, int]] = []
    seen: dict[int, int] = {}
    merges, way = 0, 0.0

    def merge() -> None:
        nonlocal merges, way
        present = [party for party, last in seen.items() if merges - last < MEMORY]
        weights = [1 / max(1, age) for _, _, age in kept]
        way += np.average([length for _, length, _ in kept], weights=weights) * len(kept) / len(present)
        merges += 1
        kept.clear()

    for _ in range(60):
        party = draw.choices(range(4), [1, 2, 4, 8])[0]
        rounds[party] += 1
        length = draw.uniform(1, 3)
        if party in [each for each, *_ in kept]:
            merge()
        kept.append((party, length, merges - seen.get(party, merges)))
        seen[party] = merges
        if len(kept) == 3:
            merge()
        job.push((party, 0), rounds[party], (length / 5) * SAME)
    np.testing.assert_allclose(value(job), -RATE * way * SAME / 5, rtol=1e-5)
