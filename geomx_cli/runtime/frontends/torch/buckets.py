"""A party's gradients: added in buckets by its workers, and exchanged by its leader."""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.checks import BatchCheck, GradientCheck
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.script_model import last_gradients
from geomx_cli.runtime.frontends.torch.synchroniser import Carrier
from geomx_cli.runtime.frontends.torch.tensors import BUFFERS, EXCHANGED, SentGradient, check_gradient

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.runtime.frontends.torch.backward_pass import PartyOperations
    from geomx_cli.runtime.frontends.torch.party_group import PartyGroup
    from geomx_cli.runtime.training.stop_vote import StopVote

__all__ = ["BucketExchanges", "Buckets"]

_FIRST = 1 << 20
_REST = 4 << 20
"""Bytes of the first bucket, which is small so that it begins early, and of the others. A bucket crosses the WAN only
once it has been added, and is copied to the party only once all of it is back. DistributedDataParallel's buckets have
25 MiB.
"""


@dataclass(eq=False, slots=True)
class Slot:
    """A key, and the place of its elements: the gradient of `parameter`, or all `buffers`.

    loaded: whether it was loaded from `gradient` in this round.
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
    """Slots in one vector. The vector ends with a number for each slot: of how many workers it contains gradients.

    work: the operation in progress.
    missing: slots that are not loaded yet.
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


class Buckets(Carrier):
    """The sums over a party's workers of the gradients of a model, added during the backward pass.

    All workers add buckets in the same order, beginning with the last tensors. A tensor without a gradient here counts
    as zeros. So do all tensors of a worker that has finished.

    on_begun: called for each bucket whose addition has begun, in order; in autograd's threads too.
    """

    def __init__(
        self, operations: "PartyOperations", state: ModelState, statistics: Sequence[Any], check: BatchCheck
    ) -> None:
        super().__init__()
        self.group = operations.group
        self._state = state
        self._check = check
        slots = _slots(state, statistics)
        self.slots = [slot for slot in slots if slot.parameter is not None]
        self._statistics = slots[0] if statistics else None
        self.on_begun: Callable[[Bucket], None] = lambda bucket: None
        self._lock = threading.Lock()
        self.buckets = [Bucket(part, operations.device) for part in _divided(list(reversed(slots)))]
        self._place = {slot: bucket for bucket in self.buckets for slot in bucket.slots}
        self._next = 0
        self.begin_round(0)

    def begin_round(self, round_: int) -> None:
        """See Carrier."""
        self._next = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.loaded = False

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def load(self, slot: Slot) -> None:
        """Contribute a tensor's gradient, and begin to add the buckets that are complete. Thread-safe."""
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

    def load_rest(self) -> None:
        """See Carrier."""
        for slot in self.slots:
            if not slot.loaded and slot.parameter.grad is not None:
                self.load(slot)
        if self._statistics is not None:
            self.load(self._statistics)
        self._flush()
        if self._check.compares:
            self._check.observe(*last_gradients(self._state))

    def load_nothing(self) -> None:
        """See Carrier."""
        self.begin_round(0)
        self._flush()
        self._check.observe()  # if it gathers, all workers of the party gather in this pass

    def receive(self, workers: int) -> None:
        """Write the means over so many of the party's workers to the gradients."""
        for bucket in self.buckets:
            self.group.wait(bucket.work)
            self.store(bucket, workers)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _flush(self) -> None:
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
        bucket.work = self.group.add(bucket.vector)
        self._next += 1
        self.on_begun(bucket)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def store(self, bucket: Bucket, workers: int) -> None:
        """Write the means over so many workers to the places from which the elements came. If no worker has a gradient
        of a parameter, the parameter gets none.
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


class BucketExchanges(Buckets):
    """Synchronous gradients of a party.

    A bucket is added in the party as soon as it is complete. The leader then sends it to the servers. Its result is
    copied to the party's workers at the end of the pass.

    client, vote: the leader's; None in other workers.
    finite: receives this worker's gradients, and the means.
    """

    def __init__(
        self, operations: "PartyOperations", state: ModelState, statistics: Sequence[Any], check: BatchCheck,
        client: "Client | None", vote: "StopVote | None", finite: GradientCheck,
    ) -> None:  # fmt: skip
        super().__init__(operations, state, statistics, check)
        self._vote = vote
        self._finite = finite
        self._round = 0
        self._exchanger: _Exchanger | None = None
        if client is not None:
            self._exchanger = _Exchanger(client, self.group, operations.device)
            self.on_begun = self._exchanger.put

    def begin_round(self, round_: int) -> None:
        """See Buckets."""
        self._round = round_
        super().begin_round(round_)

    def load(self, slot: Slot) -> None:
        """See Buckets."""
        super().load(slot)  # this checks it
        if slot.parameter is not None:
            self._finite.contributes(slot.parameter, slot.parameter.grad.detach(), self._round)

    def receive(self, workers: int) -> None:
        """Write the means over all workers of all parties to the gradients."""
        arriving = self.buckets[::-1]  # the first tensors' have priority
        for bucket in arriving:
            if self._exchanger is None:
                self.group.wait(bucket.work)
            else:
                self._exchanger.write_sums(bucket)
            bucket.work = self.group.send(bucket.vector)
        everywhere = self.group.share(self._vote.result().unfinished if self._vote is not None else 0)
        for bucket in arriving:
            self.group.wait(bucket.work)
            self.store(bucket, everywhere)
            for slot in bucket.slots:
                if slot.parameter is not None and slot.parameter.grad is not None:
                    self._finite.received(slot.parameter, slot.parameter.grad.detach())

    def abstain(self) -> None:
        """See Carrier."""
        assert self._exchanger is not None
        self._exchanger.abstain([slot for bucket in self.buckets for slot in bucket.slots])

    def skip(self) -> None:
        """See Carrier."""
        assert self._exchanger is not None
        self._exchanger.skip([slot for bucket in self.buckets for slot in bucket.slots])


class _Exchanger:
    """In a party's leader: sends each bucket as soon as the party's sum is known, while the backward pass continues.

    For the training thread, except `put`. Failures in the sender's own thread are raised by `write_sums`, at the end of
    the pass.
    """

    def __init__(self, client: "Client", group: "PartyGroup", device: Any) -> None:
        self._client = client
        self._group = group
        self._pending: dict[Slot, PendingExchange] = {}
        self._sent: dict[Bucket, Future[None]] = {}
        self._host: dict[Bucket, Any] = {}
        self._stream: Any = torch.cuda.Stream() if device.type == "cuda" else None
        self._waiting: queue.SimpleQueue[tuple[Bucket, Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="geomx-party", daemon=True).start()

    def put(self, bucket: Bucket) -> None:
        """Send a bucket once it has been added."""
        future = self._sent[bucket] = Future()
        self._waiting.put((bucket, future))

    def abstain(self, slots: Sequence[Slot]) -> None:
        """Take part in a round to which no worker of the party contributes."""
        for slot in slots:
            self._pending[slot] = self._client.exchange(slot.key, None, None, priority=slot.priority)

    def skip(self, slots: Sequence[Slot]) -> None:
        """Wait for the result of that round, and drop it."""
        for slot in slots:
            self._pending.pop(slot).done.result()

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def write_sums(self, bucket: Bucket) -> None:
        """Wait for the sums over all parties, and write them to the bucket. A tensor's count is above 0 if any worker
        has a gradient of it.
        """
        self._sent.pop(bucket).result()
        host = self._host_of(bucket)
        counts = host[-len(bucket.slots) :]
        for index, (slot, view) in enumerate(zip(bucket.slots, self._views(bucket), strict=True)):
            exchange = self._pending.pop(slot)
            exchange.done.result()
            if not counts[index]:  # abstained
                if exchange.weight > 0:
                    exchange.copy_to(view.numpy())
                else:
                    view.zero_()
            counts[index] = float(exchange.weight > 0)
        if host is not bucket.vector:
            bucket.vector.copy_(host)

    def _run(self) -> None:
        while True:
            bucket, sent = self._waiting.get()
            try:
                self._send(bucket)
                sent.set_result(None)
            except BaseException as error:
                sent.set_exception(error)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _send(self, bucket: Bucket) -> None:
        host = self._host_of(bucket)
        if host is bucket.vector:
            self._group.wait(bucket.work)
        else:
            with torch.cuda.stream(self._stream):  # the default stream has the rest of the backward pass
                self._group.wait(bucket.work)
                host.copy_(bucket.vector, non_blocking=True)
                self._stream.synchronize()
        counts = host[-len(bucket.slots) :].tolist()
        for slot, view, count in zip(bucket.slots, self._views(bucket), counts, strict=True):
            elements = view.numpy() if count else None
            self._pending[slot] = self._client.exchange(
                slot.key, elements, elements, priority=slot.priority, weight=count or 1.0
            )

    def _host_of(self, bucket: Bucket) -> Any:
        """The bucket's vector in CPU memory."""
        if not bucket.vector.is_cuda:
            return bucket.vector
        if bucket not in self._host:
            self._host[bucket] = torch.empty_like(bucket.vector, device="cpu", pin_memory=True)
        return self._host[bucket]

    def _views(self, bucket: Bucket) -> Any:
        return self._host_of(bucket).split([*(slot.size for slot in bucket.slots), len(bucket.slots)])[:-1]


def _slots(state: ModelState, statistics: Sequence[Any]) -> list[Slot]:
    """The slots in the model's order, with the higher priorities first. The statistics come first, but are sent last.
    """
    slots = [
        Slot(f"{state.prefix}{name}", parameter.numel(), EXCHANGED[parameter.dtype], -index, parameter)
        for index, (name, parameter) in enumerate(state.trained.items())
    ]
    if statistics:
        size = sum(tensor.numel() for tensor in statistics)
        slots.insert(
            0, Slot(f"{state.prefix}{BUFFERS}", size, torch.float32, -len(slots), buffers=list(statistics))
        )
    return slots


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
