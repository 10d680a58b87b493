"""The leader of a party exchanges the party's sums with the servers (fsa, sync)."""

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.runtime.frontends.torch.party.buckets import Bucket, Slot

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.runtime.frontends.torch.party.operations import Operations
    from geomx_cli.runtime.training.stop_vote import StopVote

__all__ = ["Exchanger"]


class Exchanger:
    """Sends each bucket as soon as the party's sum is known, from a thread of its own, beside the backward pass.

    For the training thread, but for `put`. What fails in the own thread is raised by `take`, at the end of the pass.
    """

    def __init__(self, client: "Client", operations: "Operations", vote: "StopVote") -> None:
        self._client = client
        self._group = operations.group
        self._vote = vote
        self._pending: dict[Slot, PendingExchange] = {}
        self._sent: dict[Bucket, Future[None]] = {}
        self._host: dict[Bucket, Any] = {}
        self._stream: Any = torch.cuda.Stream() if operations.device.type == "cuda" else None
        self._waiting: queue.SimpleQueue[tuple[Bucket, Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="geomx-party", daemon=True).start()

    def put(self, bucket: Bucket) -> None:
        """Send a bucket once it has been added."""
        future = self._sent[bucket] = Future()
        self._waiting.put((bucket, future))

    def vote(self, workers: int) -> None:
        """So many of the party's workers contribute to this round."""
        self._vote.begin(stop=False, unfinished=True, weight=workers)

    def abstain(self, slots: "list[Slot]") -> None:
        """Take part in a round to which no worker of the party contributes."""
        for slot in slots:
            self._pending[slot] = self._client.exchange(slot.key, None, None, priority=slot.priority)
        self._vote.begin(stop=False, unfinished=False)

    def skip(self, slots: "list[Slot]") -> None:
        """Wait for the result of that round, and drop it."""
        for slot in slots:
            self._pending.pop(slot).done.result()

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def take(self, bucket: Bucket) -> None:
        """Wait for the sums over all parties, and write them to the bucket; each count says whether any has one."""
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
            with torch.cuda.stream(self._stream):  # the default one has the rest of the backward pass
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
