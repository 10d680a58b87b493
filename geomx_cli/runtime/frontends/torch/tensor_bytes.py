"""The bytes of tensors: any dtype and device, exactly."""

from typing import Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array

__all__ = ["check_dense", "of_bytes", "read_bytes", "write_bytes"]


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
