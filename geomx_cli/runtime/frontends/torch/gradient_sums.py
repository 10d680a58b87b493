"""The sums that a backward pass begins: the buckets of DistributedDataParallel, and those of synchronised layers."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core.futures import after, first, pass_on
from geomx_cli.runtime.frontends.torch.backward_pass import call_at_end
from geomx_cli.runtime.frontends.torch.finite import FEW
from geomx_cli.runtime.frontends.torch.futures import PendingWork
from geomx_cli.runtime.frontends.torch.lanes import Lane
from geomx_cli.runtime.frontends.torch.staging import DeviceCopies, Staging

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
    from geomx_cli.runtime.frontends.torch.finite import GradientCheck
    from geomx_cli.runtime.frontends.torch.group_rounds import GroupRounds, LoneRounds

__all__ = ["GradientSums", "in_pass"]

_LARGE = 8192
"""Elements up to which a tensor in a backward pass may be statistics of a layer, which must not be encoded."""


class GradientSums:
    """Sums that begin within a backward pass; called in autograd's threads.

    A tensor's key tells its position in the pass, so that a codec's residual belongs to one bucket.
    The end of the pass waits for all of them, and raises the client's error itself. An error that PyTorch's C++ code
    raised would have lost its type, and its wait cannot be interrupted.
    Before it waits, it compares the calls that the workers have made in the pass: those that differ would never
    complete. A wait within the pass, as of a synchronised layer, does so too.

    passes: that have begun a sum. finite: gets the first elements of each pass.
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
        """Whether `begin` is to sum this tensor: a large one, within a backward pass."""
        return int(tensor.numel()) > _LARGE and in_pass()

    def begin(self, tensor: Any, divisor: int, call: str) -> PendingWork:
        """Sum the tensor in place, and divide the sum. One that is contiguous, of float32 and on the CPU is not copied.
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
            except Exception as error:  # in a thread of `copies` nobody else would take it
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
        """Have the end of the backward pass in progress, if there is one, wait for `work`; returns it."""
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
        """Wait for it after these calls of the pass in progress, unless others have made other calls: then it fails."""
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
            calls, self._calls = [*self._calls, "the end of the pass"], []  # and those of a pass before that has failed
            self._is_open = False
        for copies in self._copies.values():
            copies.settle()
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
    """Whether a backward pass in progress in this thread makes the next call, and no callback of a future, which its
    hooks run too where the result is there already.
    """
    return bool(torch._C._current_graph_task_id() != -1) and Lane.present() is None


def _divide(elements: "Array", divisor: int) -> None:
    np.divide(elements, divisor, out=elements)
