"""The rounds of which the collectives of a process group consist: sums of elements, and exact copies of bytes.

All workers begin the same rounds in the same order. A key's name tells what the round does and how large it is. So that
the number of keys stays bounded, sizes are rounded up, large ones by at most an eighth.
"""

import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.futures import after, finished, pass_on
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.runtime.frontends.torch.ddp.futures import Lane
from geomx_cli.runtime.frontends.torch.ddp.made_calls import ALIKE, PASS, MadeCalls

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.runtime.frontends.torch.ddp.made_calls import SkippedBatches

__all__ = ["PREFIX", "GroupRounds", "LoneRounds", "check_parts", "check_whole", "size_class"]

PREFIX = "c10d/"
"""Prefix of the names of all keys."""

_SMALLEST = 64
_CALL = 60
"""Characters of a call. A longer one ends in its checksum. The number of a batch follows in 4 bytes."""
_TABLE = 65_536
"""The most bytes of all workers that are gathered in one round. More bytes are gathered in one round for each worker.
"""


class GroupRounds:
    """The rounds of the process group number `group`. Methods return at once, except in the first round of a key. Any
    thread may call them as long as the order in each lane is the same in all workers. Futures fail with the client's
    error if the job fails. They fail with TrainingFailed if a worker has left the job and so does not take part.

    while_waiting: see Lane.
    repeats: whether an earlier life of this worker may have made the same calls. Their results are then known.
    difference: the error of workers that made different calls. It has ended the job.
    """

    def __init__(
        self, client: "Client", group: int, batches: "SkippedBatches", while_waiting: "Callable[[Future[Any]], None]",
        *, repeats: bool,
    ) -> None:  # fmt: skip
        self.repeats = repeats
        self._client = client
        self._group = group
        self._lock = threading.Lock()
        self.workers = client.num_all_workers
        self.rank = client.global_rank
        self._own = Lane("", f"then{group}", while_waiting)
        self.difference: InvalidSettings | None = None
        self._batches = batches
        self.made = MadeCalls(client.control, group, self.rank, batches)

    @property
    def calls(self) -> int:
        """The script's calls so far. A backward pass counts as one call."""
        return self._own.calls

    def state(self) -> dict[str, Any]:
        """Return the state between calls, without the client's rounds."""
        return {"lane": self._own.state(), "made": self.made.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        self._own.load(state["lane"])
        self.made.load(state["made"])

    def next_lane(self) -> Lane:
        """The lane of the next operation of this thread."""
        return self._lane().next()

    def lane_of(self, position: int) -> Lane:
        """The lane of the operation at this position of a backward pass."""
        name = f"pass{self._group}.{position}"
        return Lane(name, name, self._own.while_waiting)

    def _lane(self) -> Lane:
        return Lane.present() or self._own

    def agree(self, call: str) -> "Future[None]":
        """Compare the call that this worker makes with the other workers' calls, concurrently with the rounds of the
        call. If calls differ, it fails with InvalidSettings in all workers, because their rounds would wait for each
        other, or give wrong results. This also ends the job, because a script that catches the error would wait for
        such rounds at its end.
        """
        lane = self._lane()
        with self._lock:
            lane.calls += 1
            which = f"operation {lane.calls}{' in a callback' if lane.name else ''}"
            if not lane.name:
                self.made.note(call)
        return self._compare(call, which)

    def begin_pass(self) -> None:
        """A backward pass begins. It is one operation, and is compared at its end."""
        with self._lock:
            self._own.calls += 1
            self.made.note(PASS)

    def agree_in_pass(self, calls: Sequence[str]) -> "Future[None]":
        """Like `agree`, at the end of a backward pass, for all calls in the pass."""
        text = f"{PASS}, {zlib.crc32(repr(calls).encode()):08x}"
        return self._compare(text, f"operation {self._own.calls}", calls, ends=True)

    def look_in_pass(self, calls: Sequence[str], waits: "Future[Any]") -> "Future[None]":
        """Like `agree`, while this worker waits in a backward pass after these calls. Fails if others made other calls.
        """
        found = self.made.look_in_pass(f"operation {self._own.calls}", calls, waits, self.workers)
        failed: Future[None] = Future()
        found.add_done_callback(lambda found: failed.set_exception(self._end(found)))
        return failed

    def _compare(self, call: str, which: str, calls: Sequence[str] = (), *, ends: bool = False) -> "Future[None]":
        if len(call) > _CALL:
            call = f"{call[: _CALL - 9]} {zlib.crc32(call.encode()):08x}"
        row = call.ljust(_CALL).encode("ascii", "replace") + self._batches.number.to_bytes(4, "little")
        made, agreed = self.gather(np.frombuffer(row, np.uint8), "call"), Future[None]()

        def compare(_: "Future[Array]") -> None:
            try:
                rows = made.result()
                texts = [row[:_CALL].tobytes().decode("ascii", "replace").rstrip() for row in rows]
                batches = [int.from_bytes(row[_CALL:].tobytes(), "little") for row in rows]
                if texts[self.rank] != call:
                    what = f"this worker was started again, and its {which} is {call}; before it was {texts[self.rank]}"
                    raise InvalidSettings(what, "let the script make the same calls each time it runs")
                why = self._difference(texts, batches, which, calls)
            except Exception as error:
                agreed.set_exception(error)
                return
            if why is None and ends:
                self._batches.compare(batches)
            if why is None:
                agreed.set_result(None)
            else:
                why.add_done_callback(lambda found: agreed.set_exception(self._end(found)))

        made.add_done_callback(compare)
        return agreed

    def _difference(
        self, texts: Sequence[str], batches: Sequence[int], which: str, calls: Sequence[str]
    ) -> "Future[InvalidSettings] | None":
        """The message if the calls of the workers differ. texts, batches: by rank."""
        rank = next((rank for rank, other in enumerate(texts) if other != texts[0]), 0)
        if not rank:
            return None
        if texts[0].startswith(PASS) and texts[rank].startswith(PASS):
            return self.made.calls_differ(which, calls, 0, rank)
        at = [f" at batch {batches[each]} of its DataLoader" if batches[each] else "" for each in (0, rank)]
        own, other = (PASS if texts[each].startswith(PASS) else texts[each] for each in (0, rank))
        what = f"worker 0's {which} is {own}{at[0]}, and worker {rank}'s is {other}{at[1]}"
        return finished(InvalidSettings(what, ALIKE))

    def _end(self, found: "Future[InvalidSettings]") -> BaseException:
        """End the job with the difference that was found, or with a failure that happened meanwhile."""
        if (error := found.exception()) is not None:
            return error
        self.difference = found.result()
        # Not in this thread: it is the client's own thread, for which `close` waits.
        threading.Thread(target=self._client.close, args=(self.difference,), daemon=True).start()
        return self.difference

    def sum(self, name: str, elements: "Array") -> "Future[None]":
        """Replace the elements (1-D, float32 or float64) by their sums over all workers. `--compress` applies."""
        exchange = self._exchange(f"{name}/{elements.dtype}/{elements.size}", elements, elements)
        return self._complete(exchange, self.workers)

    def broadcast(self, source: int, data: "Array | None", size: int) -> "Future[Array]":
        """Return the `size` bytes (1-D, uint8) of the worker of rank `source` in all workers. The others pass None."""
        buffer = np.zeros(size_class(size), np.uint8)
        if data is not None:
            buffer[:size] = data
        exchange = self._exchange(f"copy/{source}/{buffer.size}", buffer if self.rank == source else None, buffer)
        return after([self._complete(exchange, 1)], lambda: buffer[:size])

    def gather(self, data: "Array", kind: str = "table") -> "Future[Array]":
        """Return the bytes of all workers, by rank, in all workers: of shape (workers, size). Each worker's bytes are
        1-D, uint8, and of the same size.
        """
        size, room = data.size, size_class(data.size)
        if room * self.workers <= _TABLE or kind != "table":
            table = np.zeros((self.workers, room), np.uint8)
            table[self.rank, :size] = data
            # Before gradients that wait to be sent, because the end of a backward pass needs both.
            first = int(kind != "table")
            exchange = self._exchange(f"{kind}/{room}", table.reshape(-1), table.reshape(-1), priority=first)
            return after([self._complete(exchange, self.workers)], lambda: table[:, :size])
        rows = [self.broadcast(rank, data if rank == self.rank else None, size) for rank in range(self.workers)]
        return after(rows, lambda: np.stack([row.result() for row in rows]))

    def _exchange(
        self, name: str, source: "Array | None", out: "Array", *, priority: int = 0
    ) -> "PendingExchange":
        lane = self._lane().name
        key = f"{PREFIX}{self._group}/{lane}/{name}" if lane else f"{PREFIX}{self._group}/{name}"
        with self._lock:
            if key not in self._client.tensors:
                self._client.declare([Tensor(key, out.size, str(out.dtype))])
            return self._client.exchange(key, source, out, priority=priority)

    def _complete(self, exchange: "PendingExchange", contributions: int) -> "Future[None]":
        done: Future[None] = Future()

        def check(ended: "Future[None]") -> None:
            try:
                ended.result()
                if exchange.weight == contributions:
                    done.set_result(None)
                else:
                    pass_on(self.made.missing(), done)
            except Exception as error:
                done.set_exception(error)

        exchange.done.add_done_callback(check)
        return done


class LoneRounds:
    """The rounds of a process group of one worker: nothing leaves it. See GroupRounds."""

    difference = None
    repeats = False
    workers, rank = 1, 0

    def __init__(self) -> None:
        self._own = Lane("", "alone")

    def next_lane(self) -> Lane:
        """See GroupRounds."""
        return (Lane.present() or self._own).next()

    def lane_of(self, position: int) -> Lane:
        """See GroupRounds."""
        return Lane(f"alone.{position}", f"alone.{position}")

    def agree(self, call: str) -> "Future[None]":
        """See GroupRounds."""
        return finished(None)

    def begin_pass(self) -> None:
        """See GroupRounds."""

    def agree_in_pass(self, calls: Sequence[str]) -> "Future[None]":
        """See GroupRounds."""
        return finished(None)

    def look_in_pass(self, calls: Sequence[str], waits: "Future[Any]") -> "Future[None]":
        """See GroupRounds."""
        return Future()

    def sum(self, name: str, elements: "Array") -> "Future[None]":
        """See GroupRounds."""
        return finished(None)

    def broadcast(self, source: int, data: "Array | None", size: int) -> "Future[Array]":
        """See GroupRounds."""
        assert data is not None
        return finished(data.copy())

    def gather(self, data: "Array", kind: str = "table") -> "Future[Array]":
        """See GroupRounds."""
        return finished(data.copy()[None])


def size_class(size: int) -> int:
    """`size` rounded up: to a power of two from 64 to 4096. Above that, by at most an eighth."""
    if size <= 4096:
        return max(_SMALLEST, 1 << max(0, size - 1).bit_length())
    step: int = 1 << (size.bit_length() - 4)
    return -(-size // step) * step


def check_parts(call: str, parts: Sequence[Any], size: int, workers: int) -> None:
    """Raise InvalidSettings unless there is a tensor of so many elements for each worker."""
    sizes = [part.numel() for part in parts]
    if sizes != [size] * workers:
        what = f"torch.distributed.{call} of a tensor of {size} elements, with a list of tensors of {sizes}"
        raise InvalidSettings(what, f"give a tensor of {size} elements for each of the {workers} workers")


def check_whole(call: str, whole: Any, size: int, kind: str) -> None:
    """Raise InvalidSettings unless the one tensor for all workers has so many elements."""
    if whole.numel() != size:
        what = f"torch.distributed.{call} with an {kind} of {whole.numel()} elements"
        raise InvalidSettings(what, f"it must have {size}, equally many for each worker")
