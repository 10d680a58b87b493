"""Trees of tensors as arrays of bytes, which any file or message can hold, and back."""

from typing import Any

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.torch.tensors import is_divided, local, plain
from geomx_cli.runtime.script.packed import pack, unpack
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["pack_state", "unpack_state"]


def pack_state(value: Any, name: str) -> State:
    """See `pack`: with tensors, those on the CPU in their own memory, dtypes and devices."""
    return pack(value, name, _to_array)


def unpack_state(state: State) -> Any:
    """Return the tree of a `pack_state`; its tensors are on the CPU."""
    return unpack(state, _from_array)


def _to_array(value: Any) -> tuple[Array, Any] | None:
    if isinstance(value, torch.dtype | torch.device):
        return np.empty(0, np.uint8), [type(value).__name__, plain(value)]
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        what = f"a tensor of layout {value.layout} on {value.device}, dtype {value.dtype}, cannot be saved"
        raise InvalidSettings(what, "save dense tensors")
    own = local(value) if is_divided(value) else value.detach()
    flat = own.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy(), ["tensor", plain(own.dtype), list(own.shape)]


def _from_array(array: Array, about: Any) -> Any:
    kind, name, *rest = about
    if kind == "device":
        return torch.device(name)
    dtype = getattr(torch, name)
    if kind == "dtype":
        return dtype
    (shape,) = rest
    if not array.size:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(array), dtype=dtype).reshape(shape)
