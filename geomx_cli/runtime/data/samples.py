"""Images with their labels, or a text: a whole split of a data set, or the part of one worker."""

import contextlib
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.datasets.catalog import BY_CLASS, BY_PARTY, DIRICHLET, IID, check_split
from geomx_cli.ps.arrays import Array, Floats

__all__ = [
    "Batch", "CHARACTERS", "Prefetch", "SampleBatches", "Samples", "TextSamples", "choose", "part_of", "shard",
    "share_of_rest", "split_text", "text_shard",
]  # fmt: skip

Batch = tuple[Floats, Floats]


@dataclass(frozen=True)
class Samples:
    """Images with their labels.

    images: uint8 or float32 of shape (n, channels, height, width).
    labels: of shape (n,), each below `classes`.
    in_order: do not shuffle batches.
    """

    images: Array
    labels: Array
    classes: int = 10
    in_order: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def batches(self, size: int, *, seed: int, epoch: int, rank: int, start: int = 0) -> "SampleBatches":
        """Return batches of every sample once, in an order that depends only on (seed, epoch, rank), from number
        `start` on.

        The arrays are new, float32: images of shape (b, channels, height, width), bytes scaled to [0, 1], and labels of
        shape (b,); the last batch may be smaller.
        """
        samples, order = self.of_epoch(seed, epoch, rank)
        return SampleBatches(samples, order, size, start)

    def of_epoch(self, seed: int, epoch: int, rank: int) -> "tuple[Samples, Indices]":
        """Return the samples of an epoch, and the indices of its batches' samples, one batch after the other."""
        if self.in_order:
            return self, np.arange(len(self))
        # Unlike Generator's, RandomState's streams never change: hosts with different numpy versions agree.
        sequence = np.random.SeedSequence([seed, epoch, rank])
        return self, np.random.RandomState(np.random.MT19937(sequence)).permutation(len(self))

    def chosen(self, which: "Indices | slice") -> "Samples":
        """Return copies of these samples."""
        return replace(self, images=self.images[which].copy(), labels=self.labels[which].copy())

    def take(self, which: Array | slice) -> Batch:
        """Return these samples as a batch; see `batches`."""
        chosen = self.images[which]
        images = chosen.astype(np.float32)
        if chosen.dtype == np.uint8:
            images /= 255
        return images, self.labels[which].astype(np.float32)


class SampleBatches(Iterator[Batch]):
    """The batches of one epoch. `geomx.state` saves the place in them, and returns to it without making those before.

    order: indices of the samples. start: number of the first batch.
    """

    def __init__(self, samples: Samples, order: Array, size: int, start: int) -> None:
        self._samples, self._order, self._size, self._next = samples, order, size, start

    def __next__(self) -> Batch:
        first = self._next * self._size
        if first >= len(self._order):
            raise StopIteration
        self._next += 1
        return self._samples.take(self._order[first : first + self._size])

    def state_dict(self) -> dict[str, int]:
        """Return the place before the next batch."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at the place of a `state_dict`."""
        self._next = state["next"]


# The part of one worker: evenly mixed, by class, by party, or unevenly at random.

_TRIES = 100
Indices = npt.NDArray[np.int64]


def shard(
    samples: Samples, rank: int, count: int, split: str = IID, seed: int = 1, party: range | None = None
) -> Samples:
    """Return a copy of the training data of worker `rank` of `count`. The remainder of the division is dropped.
    `party`: the ranks of its party, None in a flat cluster.

    "iid": a contiguous part of the file, which is in random order. "by-class": a contiguous part of the samples sorted
    by label, in that order in each epoch, so that batches have one or two classes. "by-party": the "by-class" part of
    its party, evenly mixed among the party's workers: parties have different classes. "dirichlet:ALPHA": a fraction of
    each class drawn from a Dirichlet distribution, with `seed`; shards differ in size. Hsu, Qi and Brown, "Measuring
    the effects of non-identical data distribution for federated visual classification", 2019, arXiv:1909.06335.

    Raises InvalidSettings if there are fewer samples than workers, or a worker would get none.
    """
    which = choose(samples.labels, samples.classes, rank, count, split, seed, party)
    return replace(samples.chosen(which), in_order=split == BY_CLASS)


def choose(
    labels: npt.NDArray[Any], classes: int, rank: int, count: int, split: str, seed: int, party: range | None
) -> Indices | slice:
    """Return the indices of the samples that `shard` gives to a worker; see there. labels: 1-D, each below `classes`;
    for "iid" only their number counts.
    """
    alpha = check_split(split, flat=party is None)
    size = len(labels) // count
    if size == 0:
        hint = "start fewer workers or give more data"
        raise InvalidSettings(f"{count} workers cannot share {len(labels)} samples", hint)
    if split == IID:
        return slice(rank * size, (rank + 1) * size)
    if split == BY_CLASS:
        return np.argsort(labels, kind="stable")[rank * size : (rank + 1) * size]
    if split == BY_PARTY:
        assert party is not None
        ordered = np.argsort(labels, kind="stable")[party.start * size : party.stop * size]
        return np.sort(ordered[rank - party.start :: len(party)])
    return _dirichlet_split(labels, classes, alpha, count, seed)[rank]


def share_of_rest(rest: Samples, rank: int, count: int, split: str, seed: int, party: range | None) -> Samples:
    """Return a copy of what worker `rank` gets of the samples that are left of an epoch, in the manner of `shard`.
    Nothing is dropped: some workers get one sample more than others, or none. Of a text, all splits are "iid".
    """
    count_left = len(rest)
    which = np.arange(count_left)
    if split != IID and not isinstance(rest, TextSamples):
        alpha = check_split(split, flat=party is None)
        if split in (BY_CLASS, BY_PARTY):
            which = np.argsort(rest.labels, kind="stable")
        elif count_left >= count:
            with contextlib.suppress(InvalidSettings):  # else evenly
                return rest.chosen(_dirichlet_split(rest.labels, rest.classes, alpha, count, seed)[rank])
    if split == BY_PARTY and party is not None:
        parts = np.array_split(which, count)[party.start : party.stop]
        return rest.chosen(np.sort(np.concatenate(parts))[rank - party.start :: len(party)])
    return rest.chosen(np.array_split(which, count)[rank])


def _dirichlet_split(labels: npt.NDArray[Any], classes: int, alpha: float, count: int, seed: int) -> list[Indices]:
    """Return the sample indices of each worker, in file order; redrawn while a worker would get none."""
    random = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, count])))
    for _ in range(_TRIES):
        owners = np.empty(len(labels), np.int64)
        for label in range(classes):
            of_class = np.flatnonzero(labels == label)
            cuts = np.cumsum(random.dirichlet(np.full(count, alpha)))[:-1] * len(of_class)
            owners[of_class] = np.searchsorted(np.round(cuts), np.arange(len(of_class)), side="right")
        if np.bincount(owners, minlength=count).all():
            return [np.flatnonzero(owners == rank) for rank in range(count)]
    hint = "give a larger ALPHA, another --seed, fewer workers or more data"
    raise InvalidSettings(f"--split {DIRICHLET}:{alpha:g}: of {count} workers one always gets no samples", hint)


# A text as training data: characters, of which a network predicts each from those before it.

CHARACTERS = 256
"""Number of classes: a text is bytes, so every text has the same."""
_HELD_OUT = 20  # one in so many characters, at the end of a text, is not trained on
_MOST_WINDOWS = 256  # windows that are evaluated, evenly spread: enough for a loss to within some thousandths


@dataclass(frozen=True)
class TextSamples(Samples):
    """Windows of a text. In each epoch the windows begin at another character, so that their borders vary.

    images: the characters, uint8 of shape (n, 1, 1, context).
    labels: for each character the next character, uint8 of shape (n, context).
    text: the text from which the windows are cut.
    """

    text: Array | None = None

    @classmethod
    def of(cls, text: Array, context: int, *, name: str = "the text") -> "TextSamples":
        """Cut a text, uint8 of shape (n,), into windows. Raises InvalidSettings if it is too short for one."""
        count = (len(text) - context) // context
        if count < 1:
            what = f"{name} has {len(text)} characters, too few for a --context of {context}"
            raise InvalidSettings(what, "give more text, fewer workers, or a smaller --context")
        windows = text[: count * context].reshape(-1, 1, 1, context)
        return cls(windows, text[1 : count * context + 1].reshape(-1, context), CHARACTERS, text=text)

    def of_epoch(self, seed: int, epoch: int, rank: int) -> "tuple[Samples, Indices]":
        """Return all windows, in an order and with an offset that depend only on (seed, epoch, rank). What is left of
        an epoch's windows has no text, and they stay as they are.
        """
        if self.text is None:
            return super().of_epoch(seed, epoch, rank)
        context = self.images.shape[-1]
        sequence = np.random.SeedSequence([seed, epoch, rank])
        offset = np.random.RandomState(np.random.MT19937(sequence)).randint(context)
        moved = self.text[offset : offset + len(self) * context + 1]
        images, labels = moved[:-1].reshape(self.images.shape), moved[1:].reshape(self.labels.shape)
        return TextSamples(images, labels, self.classes).of_epoch(seed, epoch, rank)

    def take(self, which: Array | slice) -> Batch:
        """Return these windows as a batch: numbers of characters, float32."""
        return self.images[which].astype(np.float32), self.labels[which].astype(np.float32)

    def evaluated(self) -> "TextSamples":
        """Return the windows that are evaluated: all of a short text, or some, evenly spread."""
        which = np.unique(np.linspace(0, len(self) - 1, min(len(self), _MOST_WINDOWS)).astype(np.int64))
        return TextSamples(self.images[which], self.labels[which], self.classes)


def split_text(text: Array, split: str) -> Array:
    """Return the part of a whole text on which workers train ("train"), or the rest of the text ("test")."""
    border = len(text) - len(text) // _HELD_OUT
    return text[:border] if split == "train" else text[border:]


def text_shard(samples: TextSamples, rank: int, count: int) -> TextSamples:
    """Return worker `rank`'s contiguous part of the text, of `count` equal ones. Raises as `of`."""
    assert samples.text is not None
    size = len(samples.text) // count
    part = samples.text[rank * size : (rank + 1) * size].copy()
    return TextSamples.of(part, samples.images.shape[-1], name=f"the part of one of {count} workers")


def part_of(name: str, given: Any) -> Array:
    """Return the text that a user's function gives, as uint8. Raises InvalidSettings for anything else."""
    content = given.encode() if isinstance(given, str) else given
    if not isinstance(content, bytes):
        what = f"--data {name}: it gives {type(given).__name__}, no text"
        raise InvalidSettings(what, "return str or bytes, as the network gpt predicts characters")
    return np.frombuffer(content, np.uint8)


# Prepares batches in a thread, so that the trainer does not wait for them.

AHEAD = 2
POLL = 0.5


class Prefetch:
    """Yields the items of `batches` in order, with up to two prefetched; its exceptions are raised in the same place.

    Must be closed: its thread ends then, at the latest after the batch in progress.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._made: queue.Queue[Batch | BaseException | None] = queue.Queue(AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._make, name="batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        item = None if self._closed.is_set() else self._made.get()
        if item is None:
            self._closed.set()
            raise StopIteration
        if isinstance(item, BaseException):
            self._closed.set()
            raise item
        return item

    def close(self) -> None:
        """Stop prefetching."""
        self._closed.set()

    def _make(self) -> None:
        try:
            for batch in self._batches:
                if not self._put(batch):
                    return
            self._put(None)
        except Exception as error:
            self._put(error)

    def _put(self, item: Batch | BaseException | None) -> bool:
        """Return False if the consumer has closed."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._made.put(item, timeout=POLL)
                return True
        return False
