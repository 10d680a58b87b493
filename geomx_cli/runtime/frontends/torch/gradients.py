"""Synchronous gradients: after `backward` the gradients are the means over all workers (fsa, sync)."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.buffer_means import BUFFERS, BufferMeans
from geomx_cli.runtime.frontends.torch.model_state import EXCHANGED, ModelState
from geomx_cli.runtime.frontends.torch.staging import DeviceCopies, Staging
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.training.stop_vote import STOP, StopVote

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.pending_exchange import PendingExchange

__all__ = ["GradientSynchroniser"]


@dataclass(eq=False, slots=True)
class _Slot:
    """A trained tensor, its key, and its exchange in the round in progress. had_gradient: contributed one."""

    key: str
    parameter: Any
    priority: int
    staging: Staging = field(default_factory=Staging)
    exchange: "PendingExchange | None" = None
    begun: bool = False
    had_gradient: bool = False


class GradientSynchroniser(Synchroniser):
    """A backward pass is a round, except within `no_sync`.

    Each gradient's exchange begins when autograd has accumulated it, tensors near the input with a higher priority; the
    end of the backward pass waits for the results. Gradients accumulated before count too. A tensor without a gradient
    counts as zeros; one without a gradient in all workers gets none. Failures of the job are raised from `backward`.
    statistics: buffers that become means with each round. backward: shared by all optimizers of the script. check: gets
    the first gradient of each round.
    """

    def __init__(
        self, client: "Client", state: ModelState, optimizer: Any, statistics: Sequence[Any], backward: BackwardPass,
        check: BatchCheck,
    ) -> None:  # fmt: skip
        self._client = client
        self._state = state
        self._backward = backward
        self._check = check
        self._slots = [
            _Slot(f"{state.prefix}{name}", parameter, -index)
            for index, (name, parameter) in enumerate(state.trained.items())
        ]
        devices = {slot.parameter.device for slot in self._slots if slot.parameter.is_cuda}
        self._copies = {device: DeviceCopies(device) for device in devices}
        self._buffers = BufferMeans(client, f"{state.prefix}{BUFFERS}", statistics, -len(self._slots))
        self._vote = StopVote(client, -len(self._slots), f"{state.prefix}{STOP}")
        self._lock = threading.Lock()  # autograd has a thread for each GPU
        self._pass: int | None = None  # the backward pass whose round is in progress
        self._is_first = False  # the next gradient of this pass is its first
        self._has_local = False
        self._is_newest = True  # of all workers' models, as this one contributed to the last round
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, slot)) for slot in self._slots
        ]
        optimizer.register_step_pre_hook(self._before_step)

    def _on_gradient(self, slot: _Slot, parameter: Any) -> None:
        """Autograd hook, for the parameter whose gradient is complete."""
        if self.accumulating:
            self._has_local = True
            return
        with self._lock:
            self._enter_pass()
        self._contribute(slot)

    def _enter_pass(self) -> None:
        current = torch._C._current_graph_task_id()
        if self._pass is None:
            self._pass, self._is_first = current, True
            self.rounds += 1
            self._vote.begin(stop=False, unfinished=True)
            self._backward.enter(self)
        elif self._pass != current:
            what = "a backward pass began before the gradients of the one before it had been exchanged"
            hint = "a pass that has failed cannot be repeated; checkpoint activations with use_reentrant=False"
            raise InvalidSettings(what, hint)

    def _contribute(self, slot: _Slot) -> None:
        gradient = slot.parameter.grad
        if gradient.layout != torch.strided:
            what = f"the gradient of {slot.key} is sparse"
            raise InvalidSettings(what, "create the embedding with sparse=False")
        if slot.begun:
            what = f"the gradient of {slot.key} was computed twice in one backward pass"
            raise InvalidSettings(what, "checkpoint activations with use_reentrant=False")
        slot.begun = slot.had_gradient = True
        slot.staging.load(gradient, self._copies_of(slot), partial(self._send, slot))

    def _send(self, slot: _Slot, elements: "Array") -> None:
        if self._is_first:
            self._is_first = False
            self._check.observe(elements)
        slot.exchange = self._client.exchange(slot.key, elements, elements, priority=slot.priority)

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
        """See Participant: the gradients become the means."""
        for copies in self._copies.values():
            copies.settle()
        means = [mean for slot in self._slots if (mean := self._sum(slot)) is not None]
        workers = self._vote.result().unfinished
        if workers > 1 and means:
            torch._foreach_div_(means, float(workers))
        self._buffers.take()
        self._pass, self._has_local = None, False

    def _abstain(self, slot: _Slot) -> None:
        slot.begun = True
        slot.exchange = self._client.exchange(slot.key, None, None, priority=slot.priority)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _sum(self, slot: _Slot) -> Any:
        """Wait for the sum of all workers' gradients, and return the parameter's, which is that; None for none."""
        exchange, had_gradient = slot.exchange, slot.had_gradient
        slot.exchange, slot.begun, slot.had_gradient = None, False, False
        assert exchange is not None
        exchange.done.result()
        parameter = slot.parameter
        if had_gradient:
            slot.staging.store(parameter.grad, self._copies_of(slot))
        elif exchange.weight > 0:
            received = torch.empty(parameter.shape, dtype=EXCHANGED[parameter.dtype])
            exchange.copy_to(received.view(-1).numpy())
            parameter.grad = received.to(parameter.device, parameter.dtype)
        return None if parameter.grad is None else parameter.grad.detach()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        self.check_step(self._state)
        if self._has_local:
            what = "this step would use gradients of this worker only"
            raise InvalidSettings(what, "leave the last backward pass before a step out of no_sync")

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser: abstain from the others' rounds."""
        for handle in self._handles:
            handle.remove()
        self._check.finish()
        if self._pass is not None:  # it has failed, and the script went on; the others wait for the rest of its round
            self.contribute_rest()
            yield self._vote.pending
            self.receive()
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
        self._state.conclude(Broadcast(self._client, self._elect()), trained=True)

    def _elect(self) -> int:
        """Return the highest global rank of the workers whose model is the newest."""
        return self._vote.elect(self._client.global_rank if self._is_newest else None, self._client.num_all_workers)
