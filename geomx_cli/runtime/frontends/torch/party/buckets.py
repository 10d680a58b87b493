"""Sums of a party's gradients, in buckets that are added during the backward pass."""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.model_state import check_gradient
from geomx_cli.runtime.frontends.torch.sent_gradient import SentGradient

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.party.group import PartyGroup

__all__ = ["Bucket", "Buckets", "Slot"]

_FIRST = 1 << 20
_REST = 4 << 20
"""Bytes of the first bucket, so that it begins early, and of the others: a bucket crosses the WAN only once it has been
added, and is copied to the party only once all of it is back. DistributedDataParallel's have 25 MiB.
"""


@dataclass(eq=False, slots=True)
class Slot:
    """A key and where its elements lie: the gradient of `parameter`, or all of `buffers`. loaded: in this round, from
    this gradient.
    """

    key: str
    size: int
    dtype: Any
    priority: int
    parameter: Any = None
    buffers: Sequence[Any] = ()
    loaded: bool = False
    gradient: SentGradient | None = None


@dataclass(eq=False)
class Bucket:
    """Slots in one vector, which ends with a number for each: of how many workers it contains gradients.

    work: the operation in progress. missing: slots that are not loaded yet.
    """

    slots: list[Slot]
    device: Any
    vector: Any = field(init=False)
    work: Any = None
    missing: int = 0

    def __post_init__(self) -> None:
        size = sum(slot.size for slot in self.slots)
        self.vector = torch.zeros(size + len(self.slots), dtype=self.slots[0].dtype, device=self.device)
        parts = self.vector.split([*(slot.size for slot in self.slots), len(self.slots)])
        self.views, self.counts = dict(zip(self.slots, parts[:-1], strict=True)), parts[-1]


class Buckets:
    """The sums over a party's workers of the gradients of all `slots`, given in the order of the model.

    Buckets are added in the same order by all workers, from the last slots on. A slot not loaded counts as zeros.
    on_begun: called for each bucket whose addition has begun, in order; in autograd's threads too.
    """

    def __init__(
        self, group: "PartyGroup", slots: Sequence[Slot], device: Any, on_begun: Callable[[Bucket], None] | None = None
    ) -> None:
        self._group = group
        self._on_begun = on_begun
        self._lock = threading.Lock()
        self.buckets = [Bucket(part, device) for part in _divided(list(reversed(slots)))]
        self._place = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        self._next = 0
        self.checks = True  # that the script leaves gradients alone until `store`
        self.begin()

    def begin(self) -> None:
        """Begin a round."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.loaded = False

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def load(self, slot: Slot) -> None:
        """Contribute a slot's elements, and begin to add the buckets that are complete. Thread-safe."""
        bucket = self._place[slot]
        view = bucket.views[slot]
        if slot.parameter is not None:
            _check(slot)
            slot.gradient = SentGradient(slot.parameter.grad)
            view.copy_(slot.parameter.grad.reshape(-1))
        else:
            torch.cat([tensor.detach().reshape(-1).to(view) for tensor in slot.buffers], out=view)
        with self._lock:
            slot.loaded = True
            bucket.missing -= 1
            while self._next < len(self.buckets) and not self.buckets[self._next].missing:
                self._add(self.buckets[self._next])

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def flush(self) -> None:
        """Begin to add the remaining buckets."""
        with self._lock:
            while self._next < len(self.buckets):
                bucket = self.buckets[self._next]
                for slot in bucket.slots:
                    if not slot.loaded:
                        bucket.views[slot].zero_()
                self._add(bucket)

    def _add(self, bucket: Bucket) -> None:
        loaded = [float(slot.loaded) for slot in bucket.slots]
        bucket.counts.copy_(torch.tensor(loaded, dtype=bucket.counts.dtype, device="cpu"))
        bucket.work = self._group.add(bucket.vector)
        self._next += 1
        if self._on_begun is not None:
            self._on_begun(bucket)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def store(self, bucket: Bucket, workers: int) -> None:
        """Write the means over so many workers where the elements came from. A parameter of which no worker has a
        gradient gets none.
        """
        if workers > 1:
            bucket.vector[: -len(bucket.slots)] /= workers
        counts = bucket.counts.tolist()
        for slot, count in zip(bucket.slots, counts, strict=True):
            view, sent, slot.gradient = bucket.views[slot], slot.gradient, None
            if slot.parameter is None:
                for tensor, part in zip(slot.buffers, view.split([item.numel() for item in slot.buffers]), strict=True):
                    tensor.copy_(part.view(tensor.shape))
            elif slot.parameter.grad is not None:
                if sent is not None and self.checks:
                    sent.check(slot.key, slot.parameter.grad)
                slot.parameter.grad.copy_(view.view(slot.parameter.shape))
            elif count:
                slot.parameter.grad = view.view(slot.parameter.shape).to(slot.parameter, copy=True)


def _check(slot: Slot) -> None:
    check_gradient(slot.key, slot.parameter.grad, slot.dtype)
    if slot.loaded:
        what = f"the gradient of {slot.key} was computed twice in one backward pass"
        raise InvalidSettings(what, "checkpoint activations with use_reentrant=False")


def _divided(slots: Sequence[Slot]) -> Iterator[list[Slot]]:
    """Divide slots into buckets, each of one dtype."""
    part: list[Slot] = []
    size, limit = 0, _FIRST
    for slot in slots:
        bytes_ = slot.size * slot.dtype.itemsize
        if part and (size + bytes_ > limit or part[0].dtype != slot.dtype):
            yield part
            part, size, limit = [], 0, _REST
        part.append(slot)
        size += bytes_
    if part:
        yield part
