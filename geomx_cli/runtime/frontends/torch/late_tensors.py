"""Tensors whose elements are still on their way: whoever uses one waits for it.

A tensor is late by its class, as torch's own uninitialised parameters are: PyTorch calls `__torch_function__` of that
class before any function sees its elements, which waits, and gives the tensor its own class back. So a layer of a model
waits for its own parameters, and code that reads a model in any other way never sees an old value. Modules also wait
before their forward pass, for extensions in C++ that take tensors without asking the class.
"""

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree

__all__ = ["LateStep", "become_late", "late_step", "no_longer_late", "scripted"]

# An optimizer's step for one parameter at a time, later than the script has asked for it.

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
    if len(optimizer._optimizer_step_pre_hooks) > 1:  # the script's own may read gradients
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
    """Mixin. Attribute `_geomx_arrive`: waits for the elements, calls `no_longer_late`, and writes them."""

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
        return self.__deepcopy__(memo)  # its own class's now

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
    """The ids of the parameters in ScriptModules, which must not become late: their methods read them in C++, without
    asking the class, and only a call of the module itself waits.
    """
    scripts = (module for module in model.modules() if isinstance(module, torch.jit.ScriptModule))
    return {id(parameter) for script in scripts for parameter in script.parameters()}


def become_late(tensor: Any, arrive: Callable[[], None]) -> bool:
    """Have the first use of the tensor call `arrive`, which waits for its elements, calls `no_longer_late`, and writes
    them. Return False, and change nothing, for a tensor of a class of its own.
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
    """All modules, as hooks of one would be copied and saved with it."""
    register_module_forward_pre_hook(_before_forward)


def _before_forward(module: Any, inputs: Any) -> None:
    # The modules in a ScriptModule run in C++, without hooks. Scripts may make one of a model that is trained already.
    is_script = isinstance(module, torch.jit.ScriptModule)
    for parameter in module.parameters() if is_script else module._parameters.values():
        _arrive(parameter)


def _arrive(item: Any) -> None:
    if isinstance(item, _Late):
        item._geomx_arrive()  # type: ignore[attr-defined]
