"""Reduction operations of torch.distributed, computed by each worker from the elements of all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from geomx_cli.core.errors import InvalidSettings

__all__ = ["combine", "mean", "name_of", "wide"]

_OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def name_of(operation: Any, dtype: Any) -> str:
    """The name of a ReduceOp, as "SUM". Raises InvalidSettings for one that is not supported for the dtype."""
    for name in _OPERATIONS:
        if operation == getattr(ReduceOp, name):
            if name == "AVG" and dtype == torch.bool:
                raise InvalidSettings(f"ReduceOp.AVG of {dtype}", "use another dtype")
            return name
    kind = getattr(operation, "op", operation)  # that of a ReduceOp with a factor, as of PREMUL_SUM
    text = str(kind).rpartition(".")[2]
    raise InvalidSettings(f"ReduceOp.{text} is not supported under geomx launch", f"use {', '.join(_OPERATIONS)}")


def combine(name: str, values: Sequence[Any]) -> Any:
    """Reduce tensors (1-D, on the CPU) of all workers in rank order; float16 and bfloat16 are summed in float32."""
    apply, dtype = _OPERATIONS[name], values[0].dtype
    result = values[0].to(wide(dtype))
    for value in values[1:]:
        result = apply(result, value.to(wide(dtype))).to(wide(dtype))
    if name == "AVG":
        result = mean(result, len(values))
    return result.to(dtype)


def wide(dtype: Any) -> Any:
    """The dtype in which numbers of `dtype` are added."""
    return _WIDE.get(dtype, dtype)


def mean(total: Any, count: int) -> Any:
    """A sum divided by the number of its terms; integers are rounded towards zero, as by NCCL."""
    is_whole = not (total.is_floating_point() or total.is_complex())
    return torch.div(total, count, rounding_mode="trunc" if is_whole else None)
