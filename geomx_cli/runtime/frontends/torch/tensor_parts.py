"""The part of a tensor that a process holds."""

from typing import Any

__all__ = ["is_divided", "local"]


def is_divided(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, of which each process of a mesh holds a part."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Any) -> Any:
    """The elements of a tensor that this process holds, detached and in the same memory: of a DTensor its shard."""
    own = tensor.detach()
    return own.to_local() if is_divided(own) else own
