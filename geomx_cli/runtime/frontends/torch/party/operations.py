"""The operations of a party's workers, which all take part in each: backward passes, and steps."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass, current_pass

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.party.group import Gathered, PartyGroup

__all__ = ["Operations"]

_PASS, _STEP, _PART = 1, 2, 3
"""Kinds of operations. _PART: of a backward pass in which further wrapped optimizers get gradients."""
_KINDS = 4


class Member(Protocol):
    """A wrapped optimizer's part in the operations."""

    def begin(self) -> None:
        """A backward pass has reached this optimizer."""

    def contribute(self) -> None:
        """Begin to add all gradients of the pass that are not being added."""

    def contribute_nothing(self) -> None:
        """Take part in a pass of the party's other workers."""

    def announce(self, active: Sequence[int]) -> None:
        """Workers of these ranks contribute to the pass; called before any optimizer waits for its results."""

    def receive(self, active: Sequence[int]) -> None:
        """Wait for the results of the pass."""

    def fail(self) -> None:
        """This worker's backward pass has failed, and its script has ended without a step."""

    def after_step(self, active: Sequence[int]) -> None:
        """Workers of these ranks have taken a step."""

    def leave(self) -> None:
        """All of the party's workers have finished."""


class Operations:
    """Before each operation every worker gives its number: of the wrapped optimizer and the kind of operation, or 0
    once its script has finished, so that it takes part in what the others do. device: where gradients are added.
    warn: tells the user of what affects the result.

    overlaps: gradients are added while the backward pass continues. Not with several optimizers, which it may reach in
    another order in each worker: then those that it has reached take their turns at its end.
    """

    def __init__(self, group: "PartyGroup", warn: Callable[[str], None]) -> None:
        self.group = group
        self.warn = warn
        self.device: Any = torch.device("cpu")
        self._members: list[Member] = []
        self._backward = BackwardPass()
        self._lock = threading.Lock()  # autograd has a thread for each device
        self._pass: int | None = None
        self._reached: list[Member] = []
        self._numbers: Gathered | None = None
        self._active: list[int] = []

    @property
    def overlaps(self) -> bool:
        """See the class."""
        return len(self._members) == 1

    def add(self, member: Member) -> None:
        """Add a wrapped optimizer; all workers do so in the same order."""
        self._members.append(member)

    def choose_device(self, devices: "Iterable[Any]") -> None:
        """Add gradients by NCCL if all parameters of all of the party's workers are on their GPUs, given the devices of
        this worker's; blocks. All workers call it in the same order. Raises InvalidSettings if torch has no NCCL.
        """
        own = all(device.type == "cuda" for device in devices)
        self.device = torch.device("cpu")
        if all(self.group.gather(int(own))):
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.group.use_gpus()

    def reach(self, member: Member) -> None:
        """The current backward pass has computed a gradient of this optimizer; in autograd's threads. Raises
        InvalidSettings if the pass before it has not ended.
        """
        with self._lock:
            current = current_pass(self._pass)
            if self._pass is None:
                self._pass = current
                self._backward.enter(self)
            if member not in self._reached:
                self._reached.append(member)
                member.begin()
                if self.overlaps:
                    self._numbers = self.group.begin_gather(self._number(member, _PASS))

    def contribute_rest(self) -> None:
        """See Participant; also after a pass that has failed. Raises as `check`."""
        self._reached.sort(key=self._members.index)
        for member in self._reached:
            if self._numbers is not None:
                member.contribute()
                self._active = self.check(self._numbers)
            else:
                kind = _PASS if member is self._reached[-1] else _PART
                self._active = self.check(self.group.begin_gather(self._number(member, kind)))
                member.contribute()
        for member in self._reached:
            member.announce(self._active)

    def receive(self) -> None:
        """See Participant."""
        for member in self._reached:
            member.receive(self._active)
        self._pass, self._numbers = None, None
        self._reached.clear()

    def step(self, member: Member) -> list[int]:
        """This worker has taken a step; blocks. Return the ranks of those that have. Raises as `check`."""
        return self.check(self.group.begin_gather(self._number(member, _STEP)))

    def _number(self, member: Member, kind: int) -> int:
        return self._members.index(member) * _KINDS + kind

    @staticmethod
    def check(numbers: "Gathered") -> list[int]:
        """Return the ranks of the workers that have not finished; blocks. Raises InvalidSettings if they do not do the
        same.
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
        """This worker's script has finished: take part in what the others do, until all have."""
        if self._pass is not None:  # it has failed, and the script went on; the others wait for the rest
            for member in self._reached:
                member.fail()
            self.contribute_rest()
            self.receive()
        reached: list[Member] = []
        while True:
            numbers = self.group.begin_gather(0)
            active = self.check(numbers)
            if not active:
                break
            index, kind = divmod(numbers.values[active[0]], _KINDS)
            member = self._members[index]
            if kind == _STEP:
                member.after_step(active)
                continue
            member.contribute_nothing()
            reached.append(member)
            if kind == _PASS:
                for each in reached:
                    each.announce(active)
                for each in reached:
                    each.receive(active)
                reached.clear()
        for member in self._members:
            member.leave()


def _described(number: int) -> str:
    index, kind = divmod(number, _KINDS)
    which = f" of its wrapped optimizer {index + 1}" if index else ""
    if kind == _PART:
        return f"runs a backward pass{which} and others"
    return f"runs a backward pass{which}" if kind == _PASS else f"takes a step{which}"
