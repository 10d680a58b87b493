"""The bytes of tensors: any dtype and device, exactly."""

from typing import Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array

__all__ = ["check_dense", "is_divided", "local", "of_bytes", "read_bytes", "shares_memory", "write_bytes"]

# The part of a tensor that a process holds.

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


def read_bytes(tensor: Any) -> Array:
    """The elements' bytes (1-D, uint8), in the tensor's own memory if it is contiguous and on the CPU. Raises
    InvalidSettings for a sparse tensor.
    """
    check_dense(tensor)
    flat = tensor.detach().contiguous().to("cpu").view(-1)
    found: Array = flat.view(torch.uint8).numpy()
    return found


def check_dense(tensor: Any) -> None:
    """Raise InvalidSettings for a sparse tensor, whose elements lie elsewhere."""
    if tensor.layout != torch.strided:
        what = f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} in a collective operation"
        raise InvalidSettings(what, "only sums and means of sparse_coo are supported: make it dense, as by to_dense()")


def write_bytes(tensor: Any, data: Array) -> None:
    """Set the elements from such bytes, as many as the tensor has."""
    tensor.detach().copy_(of_bytes(data, tensor.dtype).view(tensor.shape))


def of_bytes(data: Array, dtype: Any) -> Any:
    """A tensor (1-D) of such bytes, which shares their memory. They must begin at a multiple of the element's size."""
    return torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
