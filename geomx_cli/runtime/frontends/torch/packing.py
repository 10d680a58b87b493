"""Converts trees of tensors to arrays of bytes, which any file or message can hold, and back."""

from collections.abc import Sequence
from functools import partial
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
    """See `pack`. The tree may have tensors: tensors on the CPU in their own memory, with dtypes and devices. For a
    DTensor it has this process's part.
    """
    return pack(value, name, _to_array)


def unpack_state(state: State, divided: Sequence[Any] = ()) -> Any:
    """Return the tree of a `pack_state`. Its tensors are on the CPU, except DTensors.

    divided: DTensors of this process, on whose meshes the tree's DTensors are. If there are none, this process's parts
        take the place of DTensors.
    """
    return unpack(state, partial(_from_array, divided))


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
    about = [plain(own.dtype), list(own.shape)]
    if is_divided(value):
        whole = [list(value.shape), list(value.stride())]
        about = ["divided", *about, list(value.device_mesh.shape), list(map(str, value.placements)), *whole]
    else:
        about = ["tensor", *about]
    return flat.view(torch.uint8).numpy(), about


def _from_array(divided: Sequence[Any], array: Array, about: Any) -> Any:
    kind, name, *rest = about
    if kind == "device":
        return torch.device(name)
    dtype = getattr(torch, name)
    if kind == "dtype":
        return dtype
    shape, *whole = rest
    own = torch.empty(shape, dtype=dtype)
    if array.size:
        own = torch.frombuffer(bytearray(array), dtype=dtype).reshape(shape)
    return _divided(own, divided, *whole) if kind == "divided" and divided else own


def _divided(own: Any, known: Sequence[Any], mesh: list[int], placements: list[str], shape: Any, stride: Any) -> Any:
    """A DTensor of which this process has this part, placed like one of the known DTensors."""
    from torch.distributed.tensor import DTensor

    for each in known:
        if (list(each.device_mesh.shape), list(map(str, each.placements))) == (mesh, placements):
            return DTensor.from_local(
                own, each.device_mesh, each.placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
            )
    what = f"a tensor that is placed as {', '.join(placements)} on a mesh of shape {tuple(mesh)} was saved"
    raise InvalidSettings(what, "give geomx.state models and optimizers of fully_shard, on one mesh")
