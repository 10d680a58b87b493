"""Checks and conversions of the values that a script reports."""

import math
import operator
from typing import Any, SupportsIndex

from geomx_cli.core.events import MAX_COUNT

__all__ = ["count_of", "is_share", "number_of", "share_of"]


def count_of(name: str, value: SupportsIndex) -> int:
    """Return a number of steps or samples. Raises TypeError and ValueError."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, not {type(value).__name__}") from None
    if not 0 <= number < MAX_COUNT:
        raise ValueError(f"{name} must not be negative or 2**53 and more, as {number}")
    return number


def number_of(name: str, value: Any) -> Any:
    """Return a float, or a copy of a framework's scalar, as the script may change it. Raises TypeError."""
    kind = type(value)
    if kind is float:
        return value
    shape = getattr(value, "shape", None)
    if shape is None and hasattr(kind, "__float__"):
        return float(value)
    if shape is None or not (hasattr(kind, "item") or hasattr(kind, "asscalar")):
        raise TypeError(f"{name} must be a number, not {kind.__name__}")
    if tuple(shape) not in ((), (1,)):
        raise TypeError(f"{name} must be one number, not an array of shape {tuple(shape)}: report its mean")
    if not hasattr(value, "__array_interface__"):
        return value.copy() if hasattr(value, "copy") else value.detach().clone()
    try:
        return float(value.item())
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, not of dtype {value.dtype}") from None


def share_of(value: Any) -> Any:
    """Return an accuracy, which is checked if it is a float. Raises ValueError."""
    if isinstance(value, float) and not is_share(value):
        raise ValueError(f"accuracy must be between 0 and 1, not {value:g}")
    return value


def is_share(value: float) -> bool:
    """Whether it is an accuracy: from 0 to 1, or NaN."""
    return math.isnan(value) or 0 <= value <= 1
