"""Tensors whose elements are still on their way: whoever uses one waits for it.

A tensor is late by its class, as torch's own uninitialised parameters are: PyTorch calls `__torch_function__` of that
class before any function sees its elements, which waits, and gives the tensor its own class back. So a layer of a model
waits for its own parameters, and code that reads a model in any other way never sees an old value. Modules also wait
before their forward pass, for extensions in C++ that take tensors without asking the class.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import _pytree

__all__ = ["become_late", "no_longer_late", "scripted"]


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
