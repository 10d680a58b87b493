"""Batches over epochs: jobs that follow one another with other numbers of workers draw each sample once an epoch."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geomx_cli.contract import earlier_job
from geomx_cli.runtime.data.epochs import Deal, Drawn, Epochs
from geomx_cli.runtime.data.samples import Samples, TextSamples

SEED = 3
Numbers = tuple[int, int]  # parties and workers of each
NUMBERS = st.sampled_from([(2, 2), (3, 1), (1, 4), (2, 3)])
STEPS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
"""At which workers of a job stop, in turn."""


def images(count: int) -> Samples:
    """Samples whose only pixel tells which one it is."""
    labels = np.random.RandomState(1).randint(4, size=count).astype(np.uint8)
    return Samples(np.arange(count, dtype=np.float32).reshape(-1, 1, 1, 1), labels, classes=4)


def deals(numbers: Numbers, split: str, size: int, *, flat: bool) -> list[Deal]:
    """The deal as each worker knows it."""
    parties, workers = numbers
    ranges = [range(party * workers, (party + 1) * workers) for party in range(parties) for _ in range(workers)]
    own = [{} if flat else {rank: party} for rank, party in enumerate(ranges)]
    return [Deal(parties * workers, known, split, SEED, size) for known in own]


def job(
    data: Samples, numbers: Numbers, split: str, size: int, end: int, steps: list[int], before: list[Drawn],
    drawn: Counter[tuple[int, int]],
) -> Drawn:  # fmt: skip
    """Draw so many batches on each worker, at most all; count what each epoch has drawn. Return the job's end."""
    places, every = [], deals(numbers, split, size, flat=False)
    for rank, deal in enumerate(every):
        epochs = Epochs(data, deal, rank, end, before)
        taken = min(steps[rank % len(steps)], epochs.steps)
        for number, (pixels, _) in enumerate(islice(epochs.batches(0, endless=False), taken)):
            assert len(pixels) == epochs.samples(number, number + 1)
            drawn.update((epochs.place(number)[0], int(pixel)) for pixel in pixels.reshape(-1))
        places.append(epochs.place(taken))
    all_parties = {rank: party for deal in every for rank, party in deal.parties.items()}
    parties = [(one.start, one.stop) for one in all_parties.values()]
    return Drawn.of(earlier_job.Drawn(places, parties, split, SEED, size))


@pytest.mark.parametrize("split", ["iid", "by-class", "by-party", "dirichlet:0.5"])
@given(chain=st.lists(st.tuples(NUMBERS, STEPS), min_size=1, max_size=3), size=st.integers(1, 7))
def test_each_sample_is_drawn_once_an_epoch_however_often_the_numbers_change(
    split: str, chain: list[tuple[Numbers, list[int]]], size: int
) -> None:
    data, drawn, before = images(60), Counter[tuple[int, int]](), list[Drawn]()
    for numbers, steps in chain:
        before.append(job(data, numbers, split, size, 3, steps, before, drawn))
    job(data, (2, 2), split, size, 3, [10_000], before, drawn)
    assert set(drawn.values()) == {1}
    if split != "dirichlet:0.5":  # 60 is a multiple of all numbers
        assert len(drawn) == 3 * 60


def test_of_a_text_each_window_is_drawn_once_an_epoch() -> None:
    text = np.random.RandomState(2).randint(256, size=4 * 8 * 11 + 1).astype(np.uint8)
    data, size = TextSamples.of(text, 8), 2
    counts = []
    first = [Epochs(data, deal, rank, 2) for rank, deal in enumerate(deals((1, 4), "iid", size, flat=True))]
    stopped = [3, 1, 4, 2]
    counts += [Counter(_windows(epochs, 0, steps)) for epochs, steps in zip(first, stopped, strict=True)]
    places = [epochs.place(steps) for epochs, steps in zip(first, stopped, strict=True)]
    before = Drawn.of(earlier_job.Drawn(places, [], "iid", SEED, size))
    rest = [Epochs(data, deal, rank, 1, [before]) for rank, deal in enumerate(deals((1, 3), "iid", size, flat=True))]
    counts += [Counter(_windows(epochs, 0, epochs.steps)) for epochs in rest]
    assert sum(counts, Counter()) == sum((Counter(_of_first_epoch(one)) for one in first), Counter())


def _windows(epochs: Epochs, first: int, end: int) -> list[bytes]:
    batches = islice(epochs.batches(first, endless=True), end - first)
    return [window.tobytes() for characters, _ in batches for window in characters]


def _of_first_epoch(epochs: Epochs) -> list[bytes]:
    return _windows(epochs, 0, epochs.steps // 2)


def test_a_worker_may_get_nothing_of_a_rest() -> None:
    data = images(8)
    places = [(0, 3), (0, 4)]  # of 4 batches of one sample
    before = Drawn.of(earlier_job.Drawn(places, [], "iid", SEED, 1))
    shares = [Epochs(data, deal, rank, 1, [before]) for rank, deal in enumerate(deals((1, 3), "iid", 1, flat=True))]
    assert [epochs.steps for epochs in shares] == [1, 0, 0]
    assert [epochs.place(0) for epochs in shares] == [(0, 0), (1, 0), (1, 0)]
    assert list(shares[1].batches(0, endless=False)) == []


@pytest.mark.parametrize(
    "change",
    [
        {"places": []}, {"places": [[0, -1]]}, {"batch_size": 0}, {"seed": -1}, {"places": [[0, 1e400]]},
        {"places": [[0, 1], [0, 1]], "parties": [[0, 1]]},
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    fields = {"places": [[0, 1]], "parties": [], "split": "iid", "seed": 1, "batch_size": 8}
    earlier_job.decode(json.dumps(fields).encode(), earlier_job.Drawn)
    with pytest.raises(ValueError, match=r"."):
        earlier_job.decode(json.dumps(fields | change).encode(), earlier_job.Drawn)
