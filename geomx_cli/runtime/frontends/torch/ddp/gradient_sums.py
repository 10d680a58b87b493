"""The sums that a backward pass begins: buckets of DistributedDataParallel, and sums of synchronised layers."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import ReduceOp

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.futures import after, first, pass_on
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.torch.backward_pass import call_at_end
from geomx_cli.runtime.frontends.torch.checks import FEW
from geomx_cli.runtime.frontends.torch.ddp.futures import Lane, PendingWork
from geomx_cli.runtime.frontends.torch.tensors import DeviceCopies, Staging, of_bytes, read_bytes

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.checks import BatchCheck, GradientCheck
    from geomx_cli.runtime.frontends.torch.ddp.group_rounds import GroupRounds, LoneRounds

__all__ = ["GradientSums", "SparseSum", "combine", "in_pass", "mean", "name_of", "wide"]

# Reduction operations of torch.distributed, which each worker computes from the elements of all workers.
_OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def name_of(operation: Any, dtype: Any) -> str:
    """The name of a ReduceOp, as "SUM". Raises InvalidSettings for a ReduceOp that is not supported for the dtype."""
    for name in _OPERATIONS:
        if operation == getattr(ReduceOp, name):
            if name == "AVG" and dtype == torch.bool:
                raise InvalidSettings(f"ReduceOp.AVG of {dtype}", "use another dtype")
            return name
    kind = getattr(operation, "op", operation)  # the one within a ReduceOp with a factor, such as PREMUL_SUM
    text = str(kind).rpartition(".")[2]
    raise InvalidSettings(f"ReduceOp.{text} is not supported under geomx launch", f"use {', '.join(_OPERATIONS)}")


def combine(name: str, values: Sequence[Any]) -> Any:
    """Reduce tensors (1-D, on the CPU) of all workers in rank order. float16 and bfloat16 are summed in float32."""
    apply, dtype = _OPERATIONS[name], values[0].dtype
    result = values[0].to(wide(dtype))
    for value in values[1:]:
        result = apply(result, value.to(wide(dtype))).to(wide(dtype))
    if name == "AVG":
        result = mean(result, len(values))
    return result.to(dtype)


def wide(dtype: Any) -> Any:
    """The dtype in which numbers of `dtype` are added."""
    return _WIDE.get(dtype, dtype)


def mean(total: Any, count: int) -> Any:
    """A sum divided by the number of its terms. Integers are rounded towards zero, as by NCCL."""
    is_whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, count, rounding_mode="trunc" if is_whole else None)


class SparseSum:
    """The sum of a tensor (COO) over all workers, in rank order. Its elements are exchanged, and no zeros.

    Raises InvalidSettings if a worker has more elements than fit into a round.

    count: the number of its elements, as 8 bytes. Workers gather the counts first, then `elements`.
    """

    def __init__(self, tensor: Any) -> None:
        self._own = tensor.detach().cpu().coalesce()
        self.count = np.array([self._own._nnz()], "<i8").view(np.uint8)
        values = self._own.values()
        self._width = values.shape[1:].numel() * values.element_size()

    def elements(self, counts: Array) -> Array:
        """This worker's elements, in equally many bytes as in all workers. counts: each worker's `count`."""
        found = np.zeros(max(1, int(self._numbers(counts).max())) * self._size, np.uint8)
        for start, part in ((0, self._own.values()), (self._own._nnz() * self._width, self._own.indices())):
            found[start : start + part.numel() * part.element_size()] = read_bytes(part)
        return found

    def sum(self, counts: Array, rows: Array, name: str) -> Any:
        """The sum, or for "AVG" the mean. rows: each worker's `elements`."""
        values, indices = [], []
        for count, row in zip(self._numbers(counts), rows, strict=True):
            parts = row[: count * self._width].copy(), row[count * self._width : count * self._size].copy()
            values.append(of_bytes(parts[0], self._own.dtype).view(count, *self._own.values().shape[1:]))
            indices.append(of_bytes(parts[1], torch.int64).view(self._own.sparse_dim(), count))
        given = torch.cat(values).to(wide(self._own.dtype))
        total = torch.sparse_coo_tensor(torch.cat(indices, 1), given, self._own.shape).coalesce()
        result = total.values() if name == "SUM" else mean(total.values(), len(rows))
        return torch.sparse_coo_tensor(total.indices(), result.to(self._own.dtype), self._own.shape, is_coalesced=True)

    @property
    def _size(self) -> int:
        """Bytes of an element with its indices."""
        return int(self._width + 8 * self._own.sparse_dim())

    def _numbers(self, counts: Array) -> Array:
        found: Array = np.ascontiguousarray(counts).view("<i8")[:, 0]
        room = self._own.shape[: self._own.sparse_dim()].numel()
        for rank, count in enumerate(found):
            if not 0 <= count <= room:
                what = f"worker {rank} gives {count} elements of a sparse tensor that has room for {room}"
                raise InvalidSettings(what, "let all workers give tensors of equal shapes")
        return found


_LARGE = 8192
"""A tensor in a backward pass with at most so many elements may be a layer's statistics, which must not be encoded."""


class GradientSums:
    """Sums that begin within a backward pass. Called in autograd's threads.

    A tensor's key tells its position in the pass, so that a codec's residual belongs to one bucket. The end of the pass
    waits for all sums, and raises the client's error itself. If PyTorch's C++ code raised the error, it would lose its
    type; and a wait in C++ cannot be interrupted.

    Before the end of the pass waits, it compares the calls that the workers have made in the pass, because calls that
    differ would never complete. A wait within the pass, such as a synchronised layer's, compares them too.

    passes: number of passes that have begun a sum.
    finite: receives the first elements of each pass.
    """

    def __init__(
        self, rounds: "GroupRounds | LoneRounds", check: "BatchCheck", finite: "GradientCheck | None" = None
    ) -> None:
        self._rounds = rounds
        self._check = check
        self._finite = finite
        self._lock = threading.Lock()
        self.passes = 0
        self._pass = -1
        self._position = 0
        self._is_open = False
        self._begun: list[PendingWork] = []
        self._calls: list[str] = []
        self._first: Any = None
        self._actions: list[Callable[[], None]] = []
        self._copies: dict[Any, DeviceCopies] = {}

    def takes(self, tensor: Any) -> bool:
        """Whether `begin_sum` should sum this tensor: a large one, within a backward pass."""
        return int(tensor.numel()) > _LARGE and in_pass()

    def begin_sum(self, tensor: Any, divisor: int, call: str) -> PendingWork:
        """Sum the tensor in place, and divide the sum. A tensor that is contiguous, float32 and on the CPU is not
        copied.
        """
        position = self._enter()
        self.note(call)
        staging, summed, copies = Staging(), Future[None](), self._copies_for(tensor.device)

        def send(elements: "Array") -> None:
            try:
                if position == 0:
                    self._observe(elements)
                done = self._rounds.sum(f"backward/{position}", elements)
                if divisor > 1:
                    done = after([done], partial(_divide, elements, divisor))
                pass_on(done, summed)
            except Exception as error:  # in a thread of `copies` no other code would catch it
                summed.set_exception(error)

        staging.load(tensor, copies, send)
        lane = self._rounds.lane_of(position)
        return self.keep(PendingWork(summed, [tensor], lambda: staging.store(tensor, copies), lane))

    def observe(self, elements: "Array") -> None:
        """Note the elements of a small tensor before they are summed."""
        if in_pass() and self._enter() == 0:
            self._observe(elements)

    def _observe(self, elements: "Array") -> None:
        self._check.observe(elements)
        if self._finite is not None:
            self._first = torch.from_numpy(elements[:FEW])
            self._finite.contributes(None, self._first, self.passes)

    def note(self, call: str) -> None:
        """This worker makes a call in the backward pass in progress."""
        with self._lock:
            self._calls.append(call)

    def in_next_pass(self, action: Callable[[], None]) -> None:
        """Call `action` once, before the first sum of the next pass."""
        self._actions.append(action)

    def next_lane(self) -> Lane:
        """The lane of the next operation of the backward pass in progress."""
        return self._rounds.lane_of(self._enter())

    def keep(self, work: PendingWork) -> PendingWork:
        """Make the end of the backward pass in progress, if there is one, wait for `work`. Returns `work`."""
        if in_pass():
            with self._lock:
                self._begun.append(work)
            work.before_wait = partial(self._on_wait, work.lane)
        return work

    def _on_wait(self, lane: Lane, done: "Future[None]") -> None:
        """The script waits for an operation."""
        if in_pass() and self._is_open:  # DistributedDataParallel may wait after `_at_end`
            self._await(lane, done, list(self._calls))

    def _await(self, lane: Lane, done: "Future[None]", calls: Sequence[str]) -> None:
        """Wait for the operation after these calls of the pass in progress. If other workers have made other calls, it
        fails.
        """
        differ = self._rounds.look_in_pass(calls, done)
        lane.while_waiting(first([done, differ]))
        wait([done, differ], return_when=FIRST_COMPLETED)
        if differ.done():
            differ.result()
        done.result()

    def _enter(self) -> int:
        """The next position in the pass."""
        current = torch._C._current_graph_task_id()
        with self._lock:
            if current != self._pass:
                self._pass, self._position, self._is_open = current, 0, True
                self.passes += 1
                self._rounds.begin_pass()
                if self._finite is not None:
                    self._finite.begin_pass()
                call_at_end(self._at_end)
                actions, self._actions = self._actions, []
                for action in actions:
                    action()
            position, self._position = self._position, self._position + 1
        return position

    def _at_end(self) -> None:
        with self._lock:
            begun, self._begun = self._begun, []
            calls, self._calls = [*self._calls, "the end of the pass"], []  # with an earlier, failed pass
            self._is_open = False
        for copies in self._copies.values():
            copies.wait_for_fetches()
        lane = self._rounds.lane_of(self._position)
        self._await(lane, self._rounds.agree_in_pass(calls), calls)
        for work in begun:
            lane.while_waiting(work.done)
            work.done.result()
            if (error := work.lane.wait()) is not None:
                raise error
        if self._finite is not None and self._first is not None:
            self._finite.received(None, self._first)
            self._first = None

    def finish(self) -> None:
        """No pass follows."""
        if self._finite is not None:
            self._finite.stepped()

    def _copies_for(self, device: Any) -> DeviceCopies | None:
        if device.type != "cuda":
            return None
        if device not in self._copies:
            self._copies[device] = DeviceCopies(device)
        return self._copies[device]


def in_pass() -> bool:
    """Whether a backward pass in progress in this thread makes the next call, and not a callback of a future. The
    pass's hooks also run such callbacks, if the result has already arrived.
    """
    return bool(torch._C._current_graph_task_id() != -1) and Lane.present() is None


def _divide(elements: "Array", divisor: int) -> None:
    np.divide(elements, divisor, out=elements)
