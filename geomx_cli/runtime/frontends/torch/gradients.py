"""Synchronous gradients: after `backward` the gradients are the means over all workers (fsa, sync).

With p3 neither `backward` nor `step` waits for them. A gradient is late (late_tensors.py) until its exchange is over,
and after `step` so is its parameter, for which the step is then taken separately. So the next forward pass waits layer
by layer; what uses all gradients, as clipping does, waits for all of them.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass, check_no_pass, current_pass
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.buffer_broadcast import BUFFERS, BufferMeans
from geomx_cli.runtime.frontends.torch.election import elect_newest
from geomx_cli.runtime.frontends.torch.finite import GradientCheck, warn
from geomx_cli.runtime.frontends.torch.late_tensors import LateStep, become_late, late_step, no_longer_late, scripted
from geomx_cli.runtime.frontends.torch.model_state import EXCHANGED, ModelState, check_gradient
from geomx_cli.runtime.frontends.torch.sent_gradient import SentGradient
from geomx_cli.runtime.frontends.torch.staging import DeviceCopies, Staging
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.tensor_views import is_divided, local, shares_memory
from geomx_cli.runtime.training.stop_vote import STOP, StopVote

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange

__all__ = ["GradientSynchroniser", "set_gradient"]


@dataclass(eq=False, slots=True)
class _Slot:
    """A trained tensor, its key, and its exchange while that is not over. gradient: that it contributed, and elements:
    its memory, which gets the sum. step: the optimizer's, to be taken with the result.
    """

    key: str
    parameter: Any
    priority: int
    dtype: Any
    staging: Staging = field(default_factory=Staging)
    exchange: "PendingExchange | None" = None
    begun: bool = False
    gradient: SentGradient | None = None
    elements: "Array | None" = None
    step: LateStep | None = None


class GradientSynchroniser(Synchroniser):
    """A backward pass is a round, except within `no_sync`.

    Each gradient's exchange begins when autograd has accumulated it, tensors near the input with a higher priority;
    without p3 the end of the backward pass waits for the results. Gradients accumulated before count too. A tensor
    without a gradient counts as zeros; one without a gradient in all workers gets none. Failures of the job are raised
    from `backward`, and with p3 from what first uses a late tensor.
    statistics: buffers that become means with each round. backward: shared by all optimizers of the script. check: gets
    the first gradients of each round. workers: of how many each gradient is the mean already, when it is computed.
    """

    workers = 1

    def __init__(
        self, client: "Client", state: ModelState, optimizer: Any, statistics: Sequence[Any], backward: BackwardPass,
        check: BatchCheck,
    ) -> None:  # fmt: skip
        self._client = client
        self._state = state
        self._backward = backward
        self._check = check
        where = "here" if self.workers == 1 else "in this party"
        self._finite = GradientCheck(partial(warn, client), state.trained, where)
        self._slots = [
            _Slot(f"{state.prefix}{name}", parameter, -index, EXCHANGED[parameter.dtype])
            for index, (name, parameter) in enumerate(state.trained.items())
        ]
        devices = {slot.parameter.device for slot in self._slots if slot.parameter.is_cuda}
        self._copies = {device: DeviceCopies(device) for device in devices}
        self._buffers = BufferMeans(client, f"{state.prefix}{BUFFERS}", statistics, -len(self._slots))
        self._vote = StopVote(client, 1, f"{state.prefix}{STOP}")  # first, as every mean is divided by its weight
        self._lock = threading.Lock()  # autograd has a thread for each GPU
        self._pass: int | None = None  # the backward pass whose round is in progress
        self._notes = False  # gradients of this pass for the check, up to the first matrix's
        self._is_newest = True  # of all workers' models, as this one contributed to the last round
        self._has_failed = False  # this one's last pass has, so that it has not taken the step
        self._p3 = bool(client.settings.options["p3"]) and not statistics
        self._late: dict[str, _Slot] = {}  # those whose exchange may not be over when their backward pass is, by key
        self._scripted = scripted(state.model) if self._p3 else set()
        self._hidden: list[tuple[Any, Any]] = []  # parameters and their gradients, within a step
        self._settling = threading.RLock()
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot)) for slot in self._slots
        ]
        if self._p3:
            self._handles += [slot.parameter.register_hook(self._before_accumulation) for slot in self._slots]
            optimizer.register_step_post_hook(self._after_step)
            for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
                register(lambda *_: self._settle_all())
        optimizer.register_step_pre_hook(self._before_step)

    def _before_accumulation(self, gradient: Any) -> None:
        """Autograd hook, before the parameter's gradient is accumulated, perhaps in memory that is still being sent."""
        self._settle_all()

    def _on_gradient(self, slot: _Slot, parameter: Any) -> None:
        """Autograd hook, for the parameter whose gradient is complete."""
        if self.accumulating:
            self.has_local = True
            return
        with self._lock:
            self._enter_pass()
        self._contribute(slot)

    def _enter_pass(self) -> None:
        current = current_pass(self._pass)
        if self._pass is None:
            self._finite.stepped()
            self._pass, self._notes = current, True
            self.rounds += 1
            self._vote.begin(stop=False, unfinished=True, weight=self.workers)
            self._backward.enter(self)

    def _contribute(self, slot: _Slot) -> None:
        check_gradient(slot.key, slot.parameter.grad, slot.dtype)
        if slot.begun:
            what = f"the gradient of {slot.key} was computed twice in one backward pass"
            raise InvalidSettings(what, "checkpoint activations with use_reentrant=False")
        # Autograd may leave a gradient in the memory of another one, or of what it still computes with.
        if not is_divided(slot.parameter) and shares_memory(slot.parameter.grad):
            slot.parameter.grad = slot.parameter.grad.clone()
        slot.begun, gradient = True, slot.parameter.grad
        slot.staging.load(local(gradient), self._copies_of(slot), partial(self._send, slot), self.workers)
        slot.gradient = SentGradient(gradient)

    def _send(self, slot: _Slot, elements: "Array") -> None:
        if self._notes:
            self._check.note(elements)
            if slot.parameter.ndim > 1:
                self._end_notes()
        self._finite.contributes(slot.parameter, torch.from_numpy(elements), self.rounds)
        slot.elements = elements
        slot.exchange = self._client.exchange(slot.key, elements, elements, priority=slot.priority)

    def _end_notes(self) -> None:
        if self._notes:
            self._notes = False
            self._check.end_round()

    def _copies_of(self, slot: _Slot) -> DeviceCopies | None:
        return self._copies.get(slot.parameter.device)

    def contribute_rest(self) -> None:
        """See Participant; also after a pass that has failed."""
        for slot in self._slots:
            if not slot.begun:
                if slot.parameter.grad is None:
                    self._abstain(slot)
                else:
                    self._contribute(slot)
        self._buffers.begin(contributes=True)

    def receive(self) -> None:
        """See Participant: the gradients become the means, with p3 later."""
        for copies in self._copies.values():
            copies.settle()
        self._end_notes()
        for slot in self._slots:
            sent = slot.gradient
            if sent is not None and not self._has_failed:  # then the script may have cleared them
                sent.check(slot.key, slot.parameter.grad)
            if self._p3 and sent is not None and become_late(sent.tensor, partial(self._settle, slot)):
                self._late[slot.key] = slot
            else:
                self._settle(slot)
        self._buffers.take()
        self._pass, self.has_local = None, False

    def _abstain(self, slot: _Slot) -> None:
        """The result is waited for at the end of the pass, as the others may have a gradient; so it goes first."""
        slot.begun = True
        slot.exchange = self._client.exchange(slot.key, None, None, priority=1 if self._p3 else slot.priority)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _settle(self, slot: _Slot) -> None:
        """Wait for the sum of all workers' gradients, and make this one's the mean; take the step that needs it."""
        with self._settling:
            if (exchange := slot.exchange) is None:
                return
            exchange.done.result()
            workers = self._vote.result().unfinished
            if slot.elements is not None:
                self._finite.received(slot.parameter, torch.from_numpy(slot.elements))
                slot.elements = None
            parameter, gradient, step = slot.parameter, slot.gradient and slot.gradient.tensor, slot.step
            slot.exchange, slot.begun, slot.gradient, slot.step = None, False, None, None
            self._late.pop(slot.key, None)
            if gradient is not None:
                no_longer_late(gradient)
                slot.staging.store(local(gradient), self._copies_of(slot), workers)
            elif exchange.weight > 0:
                received = torch.empty(local(parameter).shape, dtype=EXCHANGED[parameter.dtype], device="cpu")
                exchange.copy_to(received.view(-1).numpy())
                received.div_(float(max(1, workers)))
                set_gradient(parameter, received.to(parameter.device, parameter.dtype))
                gradient = parameter.grad
            if step is not None:
                no_longer_late(parameter)
                step(parameter, gradient)

    def _settle_all(self) -> None:
        for slot in list(self._late.values()):
            self._settle(slot)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook: hide the gradients that are late, whose parameters then become late too."""
        check_no_pass()
        self.check_step(self._state)
        self._hidden = []
        step = late_step(optimizer, args, kwargs) if self._late else None
        for slot in list(self._late.values()):
            parameter, gradient, exchange = slot.parameter, slot.gradient and slot.gradient.tensor, slot.exchange
            is_stepped = slot.step is not None or parameter.grad is not gradient
            is_over = exchange is None or exchange.done.done()
            must_wait = step is None or is_stepped or is_over or id(parameter) in self._scripted
            if must_wait or not become_late(parameter, partial(self._settle, slot)):
                self._settle(slot)
            else:
                slot.step, parameter.grad = step, None
                self._hidden.append((parameter, gradient))

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook: show them again."""
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser: abstain from the others' rounds."""
        for handle in self._handles:
            handle.remove()
        self._check.finish()
        self._finite.stepped()
        for slot in list(self._late.values()):
            if slot.exchange is not None:
                yield slot.exchange.done
            self._settle(slot)
        if self._pass is not None:  # it has failed, and the script went on; the others wait for the rest of its round
            self._has_failed = True
            self.contribute_rest()
            yield self._vote.pending
            self.receive()
            self._settle_all()
        while not self.ended:
            for slot in self._slots:
                self._abstain(slot)
            self._buffers.begin(contributes=False)
            self._vote.begin(stop=False, unfinished=False)
            yield self._vote.pending
            for slot in self._slots:
                self._skip(slot)
            self._buffers.take()
            self.ended = self._vote.result().unfinished == 0
            self._is_newest = self._is_newest and self.ended

    @staticmethod
    def _skip(slot: _Slot) -> None:
        assert slot.exchange is not None
        slot.exchange.done.result()
        slot.exchange, slot.begun = None, False

    def conclude(self) -> None:
        """See Synchroniser: all take the tensors of a worker that contributed to the last round."""
        is_stepped = self._is_newest and not self._has_failed
        self.take_newest(self._state, Broadcast(self._client, self._elect()), expects_same=is_stepped)

    def _elect(self) -> int:
        """Return the highest global rank of the workers whose model is the newest."""
        return elect_newest(self._client, self._state, is_newest=self._is_newest, has_failed=self._has_failed)


def set_gradient(parameter: Any, elements: Any) -> None:
    """Give a parameter without a gradient this one: of a DTensor, that of its shard."""
    if is_divided(parameter):
        from torch.distributed.tensor import DTensor

        elements = DTensor.from_local(
            elements, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
    parameter.grad = elements
