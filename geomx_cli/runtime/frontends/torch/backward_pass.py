"""Backward passes, in which several wrapped optimizers may get gradients, and the order of passes in a party's workers.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from geomx_cli.core.errors import InvalidSettings

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.party_group import Gathered, PartyGroup

__all__ = ["BackwardPass", "Member", "PartyOperations", "call_at_end", "check_no_pass"]


class Member(Protocol):
    """A wrapped optimizer's part in backward passes. Only PartyOperations calls `contribute_nothing` and the methods
    after it.

    entered: the number of the pass whose results it still waits for; set by BackwardPass.
    """

    entered: int | None

    def enter_pass(self) -> None:
        """A backward pass has reached this optimizer; in autograd's thread."""

    def contribute_rest(self) -> None:
        """Begin all exchanges of the pass that have not begun; also after a pass that has failed."""

    def announce(self, workers: int) -> None:
        """Announce how many workers contribute, of those for which this worker sends. Called before any optimizer waits
        for results.
        """

    def receive(self, workers: int) -> None:
        """Wait for the results of the pass, to which so many of the party's workers contribute."""

    def contribute_nothing(self) -> None:
        """Take part in a pass of the party's other workers."""

    def fail(self) -> None:
        """This worker's backward pass has failed, and its script has ended without a step."""

    def after_step(self, active: Sequence[int]) -> None:
        """The workers of these ranks have taken a step."""

    def leave(self) -> None:
        """No pass follows, in any of the party's workers."""


def _current_pass(entered: int | None) -> int:
    """The number of the backward pass in progress in this thread. Raises InvalidSettings if it differs from `entered`,
    the pass whose results are still awaited.
    """
    current: int = torch._C._current_graph_task_id()
    if entered not in (None, current):
        what = "a backward pass began before the gradients of the one before it had been exchanged"
        hint = "a pass that has failed cannot be repeated; checkpoint activations with use_reentrant=False"
        raise InvalidSettings(what, hint)
    return current


def call_at_end(callback: Callable[[], None]) -> None:
    """Make autograd call this at the end of the backward pass in progress. Raises InvalidSettings under compiled
    autograd, which would never call it.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if getattr(compiled, "in_compiled_autograd_region", False):
        what = "compiled autograd (torch._dynamo.config.compiled_autograd) does not tell when a backward pass has ended"
        raise InvalidSettings(f"{what}, so its gradients cannot be exchanged", "leave it off; torch.compile may stay")
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def check_no_pass() -> None:
    """Raise InvalidSettings within a backward pass: its gradients are still being exchanged."""
    if torch._C._current_graph_task_id() != -1:
        what = "a step of the optimizer within the backward pass, whose gradients are still being exchanged"
        hint = "call step after backward, or train with --algo hfa and without --reduce torch"
        raise InvalidSettings(what, hint)


class BackwardPass:
    """The pass in progress. Each optimizer whose parameters it reaches has a separate round.

    All members contribute their remaining gradients before one of them waits. Otherwise workers whose gradients arrive
    in different orders would wait for each other forever.

    overlaps: whether gradients are exchanged while the backward pass continues.
    """

    overlaps = True

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers  # the number of workers for which this one sends
        self._lock = threading.Lock()  # autograd has a thread for each GPU
        self._task = -1
        self._reached: list[Member] = []

    def add(self, member: Member) -> None:
        """Add a wrapped optimizer. All workers add theirs in the same order."""

    def reach(self, member: Member) -> None:
        """The current backward pass has computed a gradient of this optimizer. Called in autograd's threads. Raises
        InvalidSettings if the optimizer's previous pass has not ended.
        """
        with self._lock:
            current = _current_pass(member.entered)
            if member.entered is not None:
                return
            if current != self._task:  # the previous pass may have failed
                call_at_end(self._at_end)
                self._task, self._reached = current, []
            member.entered = current
            self._reached.append(member)
            member.enter_pass()
            member.announce(self._workers)

    def _at_end(self) -> None:
        with self._lock:
            reached, self._reached, self._task = self._reached, [], -1
        for member in reached:
            member.contribute_rest()
        for member in reached:
            member.receive(self._workers)


_PASS, _STEP, _PART = 1, 2, 3
"""Kinds of operations. _PART: the part of a backward pass in which further wrapped optimizers get gradients."""
_KINDS = 4


class PartyOperations(BackwardPass):
    """Backward passes and steps of a party's workers. All workers take part in each.

    Before each operation every worker contributes a number, which encodes the wrapped optimizer and the kind of
    operation. A worker whose script has finished contributes 0, and takes part in the other workers' operations.

    device: where gradients are added.
    on_uneven: called when some workers have finished, and others have not.
    overlaps: whether gradients are exchanged while the pass continues. Not with several optimizers, because the pass
        may reach them in a different order in each worker. Then the reached optimizers take turns at the end of the
        pass.
    """

    def __init__(self, group: "PartyGroup", on_uneven: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.group = group
        self._on_uneven = on_uneven
        self.device: Any = torch.device("cpu")
        self._members: list[Member] = []
        self._pass: int | None = None
        self._numbers: Gathered | None = None
        self._active: list[int] = []

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        """See the class."""
        return len(self._members) == 1

    def add(self, member: Member) -> None:
        """See BackwardPass."""
        self._members.append(member)

    def choose_device(self, devices: "Iterable[Any]") -> None:
        """Add gradients by NCCL if all parameters of all the party's workers are on GPUs. Blocks. All workers call it
        in the same order, each with the devices of its own parameters. Raises InvalidSettings if torch has no NCCL.
        """
        own = all(device.type == "cuda" for device in devices)
        self.device = torch.device("cpu")
        if all(self.group.gather(int(own))):
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.group.use_gpus()

    def reach(self, member: Member) -> None:
        """See BackwardPass. Raises InvalidSettings if the previous pass, of any optimizers, has not ended."""
        with self._lock:
            current = _current_pass(self._pass)
            if self._pass is None:
                call_at_end(self._at_end)
                self._pass = current
            if member not in self._reached:
                self._reached.append(member)
                member.enter_pass()
                if self.overlaps:
                    self._numbers = self.group.begin_gather(self._number(member, _PASS))

    def _at_end(self) -> None:
        """A pass has ended, perhaps with a failure. Raises the errors of `check`."""
        self._reached.sort(key=self._members.index)
        for member in self._reached:
            if self._numbers is not None:
                member.contribute_rest()
                self._active = self._agree(self._numbers)
            else:
                kind = _PASS if member is self._reached[-1] else _PART
                self._active = self._agree(self.group.begin_gather(self._number(member, kind)))
                member.contribute_rest()
        self._receive(self._reached)
        self._pass, self._numbers = None, None
        self._reached.clear()

    def _receive(self, reached: Sequence[Member]) -> None:
        for member in reached:
            member.announce(len(self._active))
        for member in reached:
            member.receive(len(self._active))

    def step(self, member: Member) -> list[int]:
        """This worker has taken a step. Blocks. Return the ranks of the workers that have. Raises the errors of
        `check`.
        """
        return self._agree(self.group.begin_gather(self._number(member, _STEP)))

    def _number(self, member: Member, kind: int) -> int:
        return self._members.index(member) * _KINDS + kind

    def _agree(self, numbers: "Gathered") -> list[int]:
        active = self.check(numbers)
        if 0 < len(active) < self.group.size:
            self._on_uneven()
        return active

    @staticmethod
    def check(numbers: "Gathered") -> list[int]:
        """Return the ranks of the workers that have not finished. Blocks. Raises InvalidSettings if their operations
        differ.
        """
        values = numbers.values
        active = [rank for rank, value in enumerate(values) if value]
        for rank in active:
            if values[rank] != values[active[0]]:
                what = f"worker {rank} of the party {_described(values[rank])}, while worker {active[0]}"
                hint = "with --reduce torch a party's workers make the same passes and steps, in the same order"
                raise InvalidSettings(f"{what} {_described(values[active[0]])}", hint)
        return active

    def follow(self) -> None:
        """This worker's script has finished. Take part in the others' operations until all scripts have finished."""
        if self._pass is not None:  # the pass failed, and the script continued; others wait for the rest
            for member in self._reached:
                member.fail()
            self._at_end()
        reached: list[Member] = []
        while True:
            numbers = self.group.begin_gather(0)
            self._active = self._agree(numbers)
            if not self._active:
                break
            index, kind = divmod(numbers.values[self._active[0]], _KINDS)
            member = self._members[index]
            if kind == _STEP:
                member.after_step(self._active)
                continue
            member.contribute_nothing()
            reached.append(member)
            if kind == _PASS:
                self._receive(reached)
                reached.clear()
        for member in self._members:
            member.leave()


def _described(number: int) -> str:
    index, kind = divmod(number, _KINDS)
    which = f" of its wrapped optimizer {index + 1}" if index else ""
    if kind == _PART:
        return f"runs a backward pass{which} and others"
    return f"runs a backward pass{which}" if kind == _PASS else f"takes a step{which}"
