"""Gradients that a worker exchanges one by one.

With p3 neither `backward` nor `step` waits for gradients. A gradient is late until its exchange is
over. After `step` its parameter is late too. The step is then taken for this parameter separately. So the next forward
pass waits layer by layer. Code that uses all gradients, such as clipping, waits for all of them.
"""

import copy
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.checks import BatchCheck, GradientCheck
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.synchroniser import Carrier
from geomx_cli.runtime.frontends.torch.tensors import (
    BUFFERS,
    EXCHANGED,
    DeviceCopies,
    SentGradient,
    Staging,
    check_gradient,
    is_divided,
    local,
    read,
    set_gradient,
    shares_memory,
    write,
)
from geomx_cli.runtime.training.model import flat_views
from geomx_cli.runtime.training.stop_vote import StopVote

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.operation_queue import PendingExchange

__all__ = ["LateStep", "TensorExchanges", "become_late", "late_step", "no_longer_late", "scripted"]

# Late tensors, whose elements are still under way: any code that uses one waits for it. A tensor is late by its class,
# as torch's own uninitialised parameters are. Before any function sees its elements, PyTorch calls `__torch_function__`
# of that class. This method waits, and gives the tensor its own class back. So a layer of a model waits for its own
# parameters, and code that reads a model in any other way never sees an old value. Modules also wait before their
# forward pass, because extensions in C++ take tensors without asking the class.

# Takes an optimizer's step for one parameter at a time, later than the script has requested it.

_SEPARATE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD,
)  # fmt: skip
"""Optimizers that update each parameter by its own gradient and state."""

LateStep = Callable[[Any, Any], None]
"""Takes the step for a parameter with its gradient."""


def late_step(optimizer: Any, args: Any, kwargs: Any) -> LateStep | None:
    """Return the step that `optimizer.step(*args, **kwargs)` would take now, with the groups' current
    hyper-parameters; None if it cannot be taken later, parameter by parameter.
    """
    if type(optimizer) not in _SEPARATE or args[1:] or kwargs or _has_compiled():
        return None
    if len(optimizer._optimizer_step_pre_hooks) > 1:  # hooks of the script may read gradients
        return None
    groups = [dict(group) for group in optimizer.param_groups]
    if any(group.get("differentiable") or _in_tensors(group) for group in groups):
        return None
    own = {id(parameter): group for group in groups for parameter in group["params"]}
    view, step = copy.copy(optimizer), inspect.unwrap(type(optimizer).step)  # a copy shares the state, and has no hooks

    def take(parameter: Any, gradient: Any) -> None:
        view.param_groups = [own[id(parameter)] | {"params": [parameter]}]
        before, parameter.grad = parameter.grad, gradient
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(parameter.device.type, enabled=False):
            step(view)
        parameter.grad = before

    return take


def _has_compiled() -> bool:
    """Whether torch.compile has compiled anything: its code reads parameters by itself."""
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters["frames"])


def _in_tensors(group: Mapping[str, Any]) -> bool:
    """Whether a hyper-parameter is a tensor, which the script may change in place."""
    return any(isinstance(value, torch.Tensor) for name, value in group.items() if name != "params")


class _Late:
    """Mixin. Its attribute `_geomx_arrive` waits for the elements, calls `no_longer_late`, and writes the elements."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _WITHOUT_ELEMENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        for item in _pytree.tree_leaves((args, kwargs)):
            _arrive(item)
        return function(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        _arrive(self)
        return self.__deepcopy__(memo)  # now the method of its own class

    def __reduce_ex__(self, protocol: Any) -> Any:
        _arrive(self)
        return self.__reduce_ex__(protocol)


class _LateTensor(_Late, torch.Tensor):  # type: ignore[misc, unused-ignore]  # torch is not installed where mypy runs
    pass


class _LateParameter(_Late, torch.nn.Parameter):  # type: ignore[misc, unused-ignore]
    pass


_CLASSES = {torch.Tensor: _LateTensor, torch.nn.Parameter: _LateParameter}
_OWN = {late: own for own, late in _CLASSES.items()}
_WITHOUT_ELEMENTS = {
    torch.Tensor.grad.__get__, torch.Tensor.grad.__set__, torch.Tensor.grad.__delete__, torch.Tensor.shape.__get__,
    torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.requires_grad.__get__, torch.Tensor.size,
    torch.Tensor.numel, torch.Tensor.dim, torch.Tensor.is_floating_point,
}  # fmt: skip


def scripted(model: Any) -> set[int]:
    """The ids of the parameters in ScriptModules. They must not become late: a ScriptModule's methods read them in C++,
    without asking the class, and only a call of the module itself waits.
    """
    scripts = (module for module in model.modules() if isinstance(module, torch.jit.ScriptModule))
    return {id(parameter) for script in scripts for parameter in script.parameters()}


def become_late(tensor: Any, arrive: Callable[[], None]) -> bool:
    """Make the first use of the tensor call `arrive`, which waits for its elements, calls `no_longer_late`, and writes
    them. Return False, and change nothing, if the tensor has a class of its own.
    """
    late = _CLASSES.get(type(tensor))
    if late is None:
        return False
    _watch_modules()
    tensor._geomx_arrive, tensor.__class__ = arrive, late
    return True


def no_longer_late(tensor: Any) -> None:
    """Give the tensor its own class back, if it is late."""
    own = _OWN.get(type(tensor))
    if own is not None:
        tensor.__class__ = own
        del tensor._geomx_arrive


@functools.cache
def _watch_modules() -> None:
    """All modules, because hooks of a single module would be copied and saved with it."""
    register_module_forward_pre_hook(_before_forward)


def _before_forward(module: Any, inputs: Any) -> None:
    # The modules in a ScriptModule run in C++, without hooks. Scripts may make one of a model that is trained already.
    is_script = isinstance(module, torch.jit.ScriptModule)
    for parameter in module.parameters() if is_script else module._parameters.values():
        _arrive(parameter)


def _arrive(item: Any) -> None:
    if isinstance(item, _Late):
        item._geomx_arrive()  # type: ignore[attr-defined]


@dataclass(eq=False, slots=True)
class _Slot:
    """A trained tensor, its key, and its exchange while that is not over.

    gradient: the gradient that it contributed.
    elements: the gradient's memory, which receives the sum.
    step: the optimizer's step, to be taken with the result.
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


class TensorExchanges(Carrier):
    """Each gradient is exchanged by itself, once autograd has accumulated it, from its own memory if possible.

    Tensors near the input have a higher priority. Without p3 the end of the backward pass waits for the results.

    vote: its weight is the number of workers that contribute to a round.
    finite: receives this worker's gradients, and the means.
    factor: the number of workers of which each gradient is the mean.
    """

    def __init__(
        self, client: "Client", state: ModelState, statistics: Sequence[Any], check: BatchCheck, vote: StopVote,
        finite: GradientCheck, factor: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self._client = client
        self._check = check
        self._vote = vote
        self._finite = finite
        self._factor = factor
        self.slots = [
            _Slot(f"{state.prefix}{name}", parameter, -index, EXCHANGED[parameter.dtype])
            for index, (name, parameter) in enumerate(state.trained.items())
        ]
        devices = {slot.parameter.device for slot in self.slots if slot.parameter.is_cuda}
        self._copies = {device: DeviceCopies(device) for device in devices}
        self._buffers = _BufferMeans(client, f"{state.prefix}{BUFFERS}", statistics, -len(self.slots))
        self._round = 0
        self._notes = False  # whether the check gets this pass's gradients, up to the first matrix's
        self._p3 = bool(client.settings.options["p3"]) and not statistics
        self._late: dict[str, _Slot] = {}  # by key, slots whose exchange may end after their backward pass
        self._scripted = scripted(state.model) if self._p3 else set()
        self._hidden: list[tuple[Any, Any]] = []  # parameters and their gradients, within a step
        self._completing = threading.RLock()

    def follow(self, optimizer: Any) -> None:
        """Register the hooks that wait for late tensors."""
        if self._p3:
            for slot in self.slots:
                slot.parameter.register_hook(self._before_accumulation)
            optimizer.register_step_post_hook(self._show_late)
            for register in (optimizer.register_state_dict_pre_hook, optimizer.register_load_state_dict_pre_hook):
                register(lambda *_: self._complete_all())

    def _before_accumulation(self, gradient: Any) -> None:
        """Autograd hook, called before the parameter's gradient is accumulated. The gradient's memory may still be
        being sent.
        """
        self._complete_all()

    def begin_round(self, round_: int) -> None:
        """See Carrier."""
        self._round, self._notes = round_, True

    def load(self, slot: _Slot) -> None:
        """See Carrier."""
        check_gradient(slot.key, slot.parameter.grad, slot.dtype)
        if slot.begun:
            what = f"the gradient of {slot.key} was computed twice in one backward pass"
            raise InvalidSettings(what, "checkpoint activations with use_reentrant=False")
        # Autograd may leave a gradient in the memory of another gradient, or of a tensor with which it still computes.
        if not is_divided(slot.parameter) and shares_memory(slot.parameter.grad):
            slot.parameter.grad = slot.parameter.grad.clone()
        slot.begun, gradient = True, slot.parameter.grad
        slot.staging.load(local(gradient), self._copies_of(slot), partial(self._send, slot), self._factor)
        slot.gradient = SentGradient(gradient)

    def _send(self, slot: _Slot, elements: "Array") -> None:
        if self._notes:
            self._check.note(elements)
            if slot.parameter.ndim > 1:
                self._end_notes()
        self._finite.contributes(slot.parameter, torch.from_numpy(elements), self._round)
        slot.elements = elements
        slot.exchange = self._client.exchange(slot.key, elements, elements, priority=slot.priority)

    def _end_notes(self) -> None:
        if self._notes:
            self._notes = False
            self._check.end_round()

    def _copies_of(self, slot: _Slot) -> DeviceCopies | None:
        return self._copies.get(slot.parameter.device)

    def load_rest(self) -> None:
        """See Carrier."""
        for slot in self.slots:
            if not slot.begun:
                if slot.parameter.grad is None:
                    self._abstain(slot)
                else:
                    self.load(slot)
        self._buffers.send(contributes=True)

    def receive(self, workers: int) -> None:
        """See Carrier."""
        for copies in self._copies.values():
            copies.wait_for_fetches()
        self._end_notes()
        for slot in self.slots:
            sent = slot.gradient
            if sent is not None and self.checks:
                sent.check(slot.key, slot.parameter.grad)
            if self._p3 and sent is not None and become_late(sent.tensor, partial(self._complete, slot)):
                self._late[slot.key] = slot
            else:
                self._complete(slot)
        self._buffers.write_means()

    def _abstain(self, slot: _Slot) -> None:
        """The end of the pass waits for the result, because other workers may have a gradient. So it gets priority."""
        slot.begun = True
        slot.exchange = self._client.exchange(slot.key, None, None, priority=1 if self._p3 else slot.priority)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _complete(self, slot: _Slot) -> None:
        """Wait for the sum of all workers' gradients, and turn this worker's gradient into the mean. Take the step that
        needs it.
        """
        with self._completing:
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

    def _complete_all(self) -> None:
        """Wait for all late tensors."""
        for slot in list(self._late.values()):
            self._complete(slot)

    def completing(self) -> Iterator["Future[None]"]:
        """See Carrier."""
        for slot in list(self._late.values()):
            if slot.exchange is not None:
                yield slot.exchange.done
            self._complete(slot)

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """See Carrier. Hide the gradients that are late. Their parameters then become late too."""
        self._hidden = []
        step = late_step(optimizer, args, kwargs) if self._late else None
        for slot in list(self._late.values()):
            parameter, gradient, exchange = slot.parameter, slot.gradient and slot.gradient.tensor, slot.exchange
            is_stepped = slot.step is not None or parameter.grad is not gradient
            is_over = exchange is None or exchange.done.done()
            must_wait = step is None or is_stepped or is_over or id(parameter) in self._scripted
            if must_wait or not become_late(parameter, partial(self._complete, slot)):
                self._complete(slot)
            else:
                slot.step, parameter.grad = step, None
                self._hidden.append((parameter, gradient))

    def _show_late(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook, after a step: show the hidden gradients again."""
        hidden, self._hidden = self._hidden, []
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def abstain(self) -> None:
        """See Carrier."""
        for slot in self.slots:
            self._abstain(slot)
        self._buffers.send(contributes=False)

    def skip(self) -> None:
        """See Carrier."""
        for slot in self.slots:
            assert slot.exchange is not None
            slot.exchange.done.result()
            slot.exchange, slot.begun = None, False
        self._buffers.write_means()


class _BufferMeans:
    """Averages a model's floating-point buffers, such as running statistics of batch normalization, by one exchange in
    each round.

    For the training thread. Without buffers nothing is exchanged. Workers that have finished contribute nothing, and
    receive the means too.
    """

    def __init__(self, client: "Client", key: str, buffers: Sequence[Any], priority: int) -> None:
        self._client = client
        self._key = key
        self._buffers = buffers
        self._priority = priority
        self._vector = np.zeros(sum(tensor.numel() for tensor in buffers), np.float32)
        self._parts = flat_views(self._vector, [tensor.numel() for tensor in buffers])
        self._exchange: PendingExchange | None = None

    def send(self, *, contributes: bool) -> None:
        """Begin a round, or abstain from it. Returns at once."""
        if not self._buffers:
            return
        if contributes:
            for part, tensor in zip(self._parts, self._buffers, strict=True):
                read(tensor, part)
        source = self._vector if contributes else None
        self._exchange = self._client.exchange(self._key, source, self._vector, priority=self._priority)

    def write_means(self) -> None:
        """Wait for the means, and write them to the buffers. Raises the client's error after the job has failed."""
        if self._exchange is None:
            return
        self._exchange.done.result()
        weight, self._exchange = self._exchange.weight, None
        if weight:
            self._vector /= np.float32(weight)
            for part, tensor in zip(self._parts, self._buffers, strict=True):
                write(tensor, part)
