"""The part of a tensor that a process holds."""

from typing import Any

import torch

__all__ = ["is_divided", "local", "shares_memory"]

_USE_COUNT: Any = getattr(torch._C, "_storage_Use_Count", None)
_OWN_USES = 2
"""Of the memory of a tensor that no other shares: by the tensor, and by the object that Python has for the memory."""


def is_divided(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which each process of a mesh holds a part."""
    return hasattr(tensor, "device_mesh")


def shares_memory(tensor: Any) -> bool:
    """Whether other tensors have this one's memory too, as views do, or PyTorch does not tell."""
    return _USE_COUNT is None or bool(_USE_COUNT(tensor.untyped_storage()._cdata) > _OWN_USES)


def local(tensor: Any) -> Any:
    """The elements of a tensor that this process holds, detached and in the same memory: of a DTensor its shard."""
    own = tensor.detach()
    return own.to_local() if is_divided(own) else own
