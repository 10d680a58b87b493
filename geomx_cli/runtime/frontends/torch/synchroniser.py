"""The object that `wrap` attaches to an optimizer: it runs an algorithm's rounds in a script's own training loop."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.backward_pass import check_no_pass
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.checks import BatchCheck
    from geomx_cli.runtime.frontends.torch.model_state import Broadcast, ModelState
    from geomx_cli.runtime.frontends.torch.reduction import Reduction

__all__ = ["Carrier", "Synchroniser"]


class Carrier:
    """Sends the gradients of a model's backward passes to the other workers, and receives their means.

    This base class does nothing. A replica of a shard uses it: fully_shard has reduced the replica's gradients, and the
    leader of the shard gives it the means.

    slots: one for each trained tensor, which is its `parameter`.
    checks: whether to check that the script does not change gradients while they are exchanged.
    """

    slots: Sequence[Any]
    checks = True

    def __init__(self, trained: Iterable[Any] = ()) -> None:
        self.slots = [SimpleNamespace(parameter=parameter) for parameter in trained]

    def begin_round(self, round_: int) -> None:
        """A backward pass begins, in this round of the optimizer."""

    def load(self, slot: Any) -> None:
        """Contribute a gradient that is complete; in autograd's threads."""

    def load_rest(self) -> None:
        """Contribute all remaining gradients, at the end of the pass."""

    def load_nothing(self) -> None:
        """Take part in a pass of the party's other workers."""

    def receive(self, workers: int) -> None:
        """Write the means to the gradients; with p3, later. workers: the number of this party's workers that
        contribute.
        """

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The optimizer is about to take a step."""

    def completing(self) -> Iterator["Future[None]"]:
        """Wait for late tensors. Yields the futures for which it waits."""
        yield from ()

    def abstain(self) -> None:
        """Take part in a round of the other workers without contributing."""

    def skip(self) -> None:
        """Wait for the results of that round, and drop the results of gradients."""


class Synchroniser(ABC):
    """Base class, one for each wrapped optimizer. For the training thread; a Member of the script's backward passes.

    rounds: number of rounds that this worker has begun.
    accumulating: whether the script is within `no_sync`.
    has_local: whether the last backward pass was within `no_sync`, and steps need exchanged gradients.
    entered: see Member.
    ended: True after `finishing`, when the optimizer can no longer step.
    replaced: a trained tensor that `share_model` has taken from another worker, though this worker's tensor should have
        been equal.
    in_step: see Compared.
    carrier: None if each step is taken with the gradients that this worker has computed.
    kept: names of the attributes that `state` saves.
    """

    kept: tuple[str, ...] = ("rounds", "has_local")
    rounds = 0
    accumulating = False
    has_local = False
    entered: int | None = None
    ended = False
    replaced = ""
    in_step = False

    def __init__(
        self, reduction: "Reduction", state: "ModelState", optimizer: Any, check: "BatchCheck",
        carrier: Carrier | None = None,
    ) -> None:  # fmt: skip
        self._reduction = reduction
        self._state = state
        self._check = check
        self._carrier = carrier
        self._took_part = True  # whether it took part in the party's last pass
        self._has_failed = False  # whether this worker's last pass has failed; then it has not taken the step
        optimizer.register_step_pre_hook(self._before_step)
        if carrier is not None:
            for slot in carrier.slots:
                slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot))
            reduction.passes.add(self)

    @property
    def steps(self) -> int:
        """The number of this worker's steps, equal in all workers that have taken the same steps."""
        return self.rounds

    # Backward passes; see Member.

    @property
    def _gradients(self) -> Carrier:
        assert self._carrier is not None
        return self._carrier

    def _on_gradient(self, slot: Any, parameter: Any) -> None:
        """Autograd hook, for the parameter whose gradient is complete."""
        if self.ended:
            return
        if self.accumulating:
            self.has_local = True
            return
        self._reduction.passes.reach(self)
        if self._reduction.passes.overlaps:
            self._gradients.load(slot)

    def enter_pass(self) -> None:
        """See Member."""
        self._gradients.begin_round(self.rounds)

    def contribute_rest(self) -> None:
        """See Member."""
        self._gradients.load_rest()
        self.has_local = False

    def announce(self, workers: int) -> None:  # noqa: B027 - not all need to know
        """See Member."""

    def receive(self, workers: int) -> None:
        """See Member."""
        self._gradients.receive(workers)
        self.entered = None

    def contribute_nothing(self) -> None:
        """See Member."""
        self._took_part = False
        self._gradients.load_nothing()

    def fail(self) -> None:
        """See Member."""
        self._has_failed = True
        self._gradients.checks = False  # the script may have cleared them

    def after_step(self, active: Sequence[int]) -> None:  # noqa: B027 - of local steps only
        """See Member."""

    def leave(self) -> None:
        """See Member."""
        self._check.finish()

    # Steps.

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Optimizer hook. Raises InvalidSettings in three cases: after the end, if the optimizer is not as it was when
        it was wrapped, or if it would use gradients that are not exchanged.
        """
        if self._carrier is not None:
            check_no_pass()
        self._state.check_unchanged()
        if self.ended:
            what = "this worker has finished: the other workers no longer train with it"
            raise InvalidSettings(what, "call geomx.finish after the last step")
        if self.has_local:
            what = f"this step would use gradients of this {self._reduction.local_to} only"
            raise InvalidSettings(what, "leave the last backward pass before a step out of no_sync")
        if self._carrier is not None:
            self._carrier.before_step(optimizer, args, kwargs)

    def scale(self) -> float | None:
        """The scale with which the GradScaler of the optimizer has begun, if it is known."""
        return None

    def while_waiting(self, other: "Future[Any]") -> None:
        """Called while the script waits for `other`, a collective operation. Returns when `other` is done, or when
        nothing is left to do meanwhile.
        """
        return

    # Between two batches of the script.

    @property
    def exchanging(self) -> bool:
        """Whether the exchange of a round is pending, and this worker does not wait for it."""
        return False

    def complete(self) -> None:
        """Wait for late tensors."""
        for _ in self._carrier.completing() if self._carrier is not None else ():
            pass

    def state(self) -> State:
        """Return the state while no round is `exchanging`, except the model and the optimizer."""
        state = State({name: getattr(self, name) for name in self.kept})
        state.add("check", self._check.state())
        return state

    def load(self, state: State) -> None:
        """Continue from a `state`, once model and optimizer have theirs."""
        for name in self.kept:
            setattr(self, name, state.values[name])
        self._check.load(state.part("check"))

    # The end.

    @abstractmethod
    def finishing(self) -> Iterator["Future[None] | None"]:
        """Contribute the remaining values, and take part in the other workers' rounds until all are finished.

        Yields the futures for which it waits, and None between two rounds, when `state` has everything. Raises the
        client's error after the job has failed.
        """

    @abstractmethod
    def share_model(self) -> None:
        """After `finishing` of all synchronisers: leave the same tensors in all workers; blocks."""

    def _take_newest(self, broadcasts: Sequence["Broadcast"], *, expects_same: bool) -> None:
        """Take all tensors of one worker. Blocks.

        expects_same: whether this worker's tensors should be equal before, because it has taken the last step too.
        """
        changed = self._state.copy_final(*broadcasts, trained=True)
        self.replaced = changed if expects_same else ""
