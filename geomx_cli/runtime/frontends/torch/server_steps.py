"""Steps of an optimizer on the global servers: parties do not wait for each other (mixed, async)."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.algorithms._async_completion import INTERVAL, CompletionClient
from geomx_cli.runtime.frontends.torch.checks import BatchCheck, is_finite, not_finite
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.script_model import last_gradients
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.tensors import EXCHANGED, check_gradient
from geomx_cli.runtime.script.remote_optimizer import PushedHyper
from geomx_cli.runtime.training.stop_vote import STOP, StopVote
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange
    from geomx_cli.runtime.frontends.torch.reduction import Reduction
    from geomx_cli.runtime.training.worker_state import WorkerState

__all__ = ["ServerSynchroniser", "ServersOptimizer"]

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes, by the size of the numbers compared as integers: nan then equals itself, and it is faster."""


@dataclass(eq=False, slots=True)
class _Slot:
    """A trained tensor, its key, the index of its group, and the arrays that are sent and received. Between steps they
    have the servers' weights.

    hidden: its gradient, within a step.
    """

    key: str
    parameter: Any
    group: int
    priority: int
    values: Any
    elements: "Array"
    exchange: "PendingExchange | None" = None
    hidden: Any = None


class ServerSynchroniser(Synchroniser):
    """Each step of the optimizer is a round of the party. It sends the gradients, after the script has clipped or
    unscaled them, with the groups' current hyper-parameters. Then it continues from the servers' weights.

    Meanwhile the gradients are hidden from the script's optimizer, so its own step changes neither weights nor its
    state. The job's failures are raised from `optimizer.step`.
    """

    kept = (*Synchroniser.kept, "_workers")

    def __init__(self, reduction: "Reduction", state: ModelState, optimizer: Any, check: BatchCheck) -> None:
        super().__init__(reduction, state, optimizer, check)
        self._client = client = reduction.member
        self._optimizer = optimizer
        self._slots = []
        for index, (name, parameter) in enumerate(state.trained.items()):
            dtype, pinned = EXCHANGED[parameter.dtype], parameter.is_cuda
            values = torch.empty(parameter.shape, dtype=dtype, device="cpu", pin_memory=pinned)
            group = index_of_group(optimizer, parameter)
            key = f"{state.prefix}{name}"
            values.copy_(parameter.detach())
            self._slots.append(_Slot(key, parameter, group, -index, values, values.view(-1).numpy()))
        self._hyper = PushedHyper()
        self._hyper.begin({}, 0)  # so that each key's first push carries all of its group's numbers
        workers = 1 if client.flat else client.num_workers
        self._share, self._workers = workers / client.num_all_workers, workers
        self._vote = StopVote(client, -len(self._slots), f"{state.prefix}{STOP}")
        self._completion = CompletionClient(client)
        self._looks = True  # whether it checks for gradients that are not finite
        optimizer.register_step_post_hook(self._after_step)
        optimizer.register_load_state_dict_post_hook(check_no_state)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook: begin the round."""
        super()._before_step(optimizer, args, kwargs)
        if kwargs.get("closure", (*args, None)[1]) is not None:
            what = "step(closure): the global servers take the step, and here there are no gradients before it"
            raise InvalidSettings(what, "compute them, then call step without arguments")
        for slot in self._slots:
            self._check_weight(slot)
        if self._check.compares:
            self._check.observe(*last_gradients(self._state))
        self.rounds += 1
        scale = self._share / self._workers  # the sum over all workers is the mean
        for slot in reversed(self._slots):
            slot.hidden, slot.parameter.grad = slot.parameter.grad, None
            if slot.hidden is None:
                self._exchange(slot, None)
            else:
                check_gradient(slot.key, slot.hidden, slot.values.dtype)
                slot.values.copy_(slot.hidden)
                slot.elements *= slot.elements.dtype.type(scale)
                self._look(slot)
                self._exchange(slot, slot.elements)
        self._vote.begin(stop=False, unfinished=True)

    @staticmethod
    def _check_weight(slot: _Slot) -> None:
        """Raise InvalidSettings if the script has changed a weight since the last step, because the servers do not know
        it.
        """
        found, weights = slot.parameter.detach(), slot.values.to(slot.parameter)
        bits, expected = (each.view(_BITS[found.element_size()]) for each in (found, weights))
        # If only the bits differ, it may be another zero.
        if not torch.equal(bits, expected) and not ((bits == expected) | (found == weights)).all():
            what = f"the script has changed {slot.key} other than by steps, and the global servers hold the weights"
            hint = (
                "load weights before wrap; where the script or a layer (nn.Embedding(max_norm=...)) changes them, train"
                " with an algorithm whose workers run the optimizer, as --algo hfa"
            )
            raise InvalidSettings(what, hint)

    def _look(self, slot: _Slot) -> None:
        """Warn once if this worker's gradient is not finite, because the global servers' weights stay spoiled. Do not
        warn if the weights that this worker received were already not finite.
        """
        if self._looks and not is_finite(slot.values):
            self._looks = False
            # Tensors arrive one by one. Other tensors may already spoil the gradient of a tensor that is still finite.
            if not all(is_finite(each.parameter.detach()) for each in self._slots):
                return
            where = f"the gradient of {slot.key} has elements that are not finite here in step {self.rounds}"
            self._reduction.warn(not_finite(where, "all workers' weights"))

    def _exchange(self, slot: _Slot, source: "Array | None") -> None:
        hyper: Mapping[str, float] = {}
        if source is not None:
            group = self._optimizer.param_groups[slot.group]
            hyper = self._hyper.news(slot.key, hyper_parameters(self._optimizer, group))
        slot.exchange = self._client.exchange(slot.key, source, slot.elements, priority=slot.priority, hyper=hyper)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook: continue from the servers' weights."""
        self._receive()
        for slot in self._slots:
            slot.parameter.grad, slot.hidden = slot.hidden, None
        self._workers = max(1, self._vote.result().unfinished)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _receive(self) -> None:
        for slot in self._slots:
            assert slot.exchange is not None
            slot.exchange.done.result()
            slot.exchange = None
            slot.parameter.copy_(slot.values)

    def state(self) -> State:
        """See Synchroniser. Includes the servers' weights of tensors that the model has in another dtype."""
        state = super().state()
        state.values["hyper"] = self._hyper.state()
        state.arrays |= {slot.key: slot.elements for slot in self._slots if slot.values.dtype != slot.parameter.dtype}
        return state

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def load(self, state: State) -> None:
        """See Synchroniser."""
        super().load(state)
        self._hyper.load(state.values["hyper"])
        for slot in self._slots:
            if slot.key in state.arrays:
                slot.elements[:] = state.arrays[slot.key]
            else:
                slot.values.copy_(slot.parameter.detach())

    def finishing(self) -> Iterator["Future[None] | None"]:
        """See Synchroniser. Abstain from the rounds of the party's other workers."""
        self._check.finish()
        while not self.ended:
            for slot in self._slots:
                self._exchange(slot, None)
            self._vote.begin(stop=False, unfinished=False)
            yield self._vote.pending
            self._receive()
            self.ended = self._vote.result().unfinished == 0
            if not self.ended:
                yield None

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def share_model(self) -> None:
        """See Synchroniser. Once all parties are finished, all workers take the global servers' weights."""
        self._completion.leave()
        while not self._completion.complete(stop=False):
            time.sleep(INTERVAL)
        pulls = [self._client.pull(slot.key, slot.elements, priority=slot.priority) for slot in self._slots]
        for slot, pull in zip(self._slots, pulls, strict=True):
            pull.result()
            slot.parameter.copy_(slot.values)
        self._state.copy_final(*self._reduction.last_broadcasts(self._state.prefix), trained=False)


# Converts an optimizer of torch.optim to the name and hyper-parameters of a server's optimizer.

Hyper = dict[str, float]


def _sgd(group: Mapping[str, Any]) -> tuple[str, Hyper]:
    names = {"momentum": "momentum", "dampening": "dampening", "nesterov": "nesterov", "weight_decay": "wd"}
    return "torch-sgd", {name: group[key] for key, name in names.items()}


def _adam(group: Mapping[str, Any]) -> tuple[str, Hyper]:
    if group["weight_decay"] and not group.get("decoupled_weight_decay"):
        hint = "use torch.optim.AdamW, or weight_decay=0"
        raise InvalidSettings("the global servers have no Adam with weight_decay as a part of the gradient", hint)
    return _adamw(group)


def _adamw(group: Mapping[str, Any]) -> tuple[str, Hyper]:
    if group["amsgrad"]:
        raise InvalidSettings("the global servers have no Adam with amsgrad", "use amsgrad=False")
    beta1, beta2 = group["betas"]
    return "adamw", {"wd": group["weight_decay"], "beta1": beta1, "beta2": beta2, "epsilon": group["eps"]}


_KINDS: Mapping[type, Callable[[Mapping[str, Any]], tuple[str, Hyper]]] = {
    torch.optim.SGD: _sgd, torch.optim.Adam: _adam, torch.optim.AdamW: _adamw,
}  # fmt: skip
_HINT = "use SGD, Adam or AdamW of torch.optim, or an algorithm whose workers run the optimizer, as --algo hfa"


def server_optimizer(optimizer: Any) -> tuple[str, dict[str, float | bool]]:
    """Return its name (see ps/optim/optimizers.py) and the hyper-parameters of its first group.

    Raises InvalidSettings for an optimizer that the servers do not compute in the same way.
    """
    kind = type(optimizer)
    if kind not in _KINDS:
        raise InvalidSettings(f"the global servers cannot run {kind.__name__}", _HINT)
    check_no_state(optimizer)
    for group in optimizer.param_groups:
        for setting in ("maximize", "fused", "differentiable"):
            if group.get(setting):
                raise InvalidSettings(f"the global servers cannot run {kind.__name__} with {setting}=True", _HINT)
        if group.get("nesterov") != optimizer.param_groups[0].get("nesterov"):
            raise InvalidSettings("the groups differ in nesterov", "use the same in all")
    name, params = _KINDS[kind](optimizer.param_groups[0])
    return name, {"learning_rate": float(optimizer.param_groups[0]["lr"]), **params}


def check_no_state(optimizer: Any) -> None:
    """Raise InvalidSettings for an optimizer that has state, because the servers' optimizer starts without state."""
    if optimizer.state:
        what = f"this {type(optimizer).__name__} has state, and the global servers, which hold its state, have none"
        raise InvalidSettings(what, "create it anew, or train with an algorithm whose workers run the optimizer")


class ServersOptimizer:
    """The one optimizer of the global servers, for all optimizers that a script wraps. Each key's pushes carry the
    numbers of its own group. So the wrapped optimizers may differ only in numbers.
    """

    def __init__(self) -> None:
        self._kind: dict[str, Any] = {}

    def set(self, client: "Client", optimizer: Any, recovery: "WorkerState") -> None:
        """Let the servers run an optimizer like this, unless an earlier life of this worker has done so.

        Raises the errors of `server_optimizer`, and InvalidSettings if the servers run another kind already.
        """
        name, params = server_optimizer(optimizer)
        kind = {"name": name, **{key: value for key, value in params.items() if isinstance(value, bool)}}
        if self._kind and kind != self._kind:
            what = f"a second optimizer of another kind with --algo {client.settings.text('algo')}: the global servers"
            hint = "use the same class and the same nesterov for all, or an algorithm whose workers run the optimizer"
            raise InvalidSettings(f"{what} run one, here {_of_kind(self._kind)}, and not {_of_kind(kind)}", hint)
        if not self._kind and client.global_rank == 0 and not recovery.is_set_up:
            client.control.set_optimizer(name, params)
            recovery.set_up()
        self._kind = kind


def _of_kind(kind: Mapping[str, Any]) -> str:
    name, *switches = kind.items()
    return " with ".join([str(name[1]), *(f"{key}={value}" for key, value in switches)])


def hyper_parameters(optimizer: Any, group: Mapping[str, Any]) -> Hyper:
    """Return a group's current hyper-parameters, which contributions carry."""
    _, params = _KINDS[type(optimizer)](group)
    numbers = {name: float(value) for name, value in params.items() if not isinstance(value, bool)}
    return {"learning_rate": float(group["lr"]), **numbers}


def index_of_group(optimizer: Any, parameter: Any) -> int:
    """Return the index of the group that has a parameter; `load_state_dict` replaces the groups themselves."""
    return next(
        index
        for index, group in enumerate(optimizer.param_groups)
        if any(item is parameter for item in group["params"])
    )
