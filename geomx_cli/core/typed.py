"""Conversion of plain data to types that msgspec checks, safe in threads."""

import threading
from typing import Any, TypeVar

import msgspec

__all__ = ["to_type"]

_Kind = TypeVar("_Kind")
# msgspec 0.22 prepares a type when it is first used, and crashes if another thread uses the type meanwhile.
_preparing = threading.RLock()


def to_type(value: Any, kind: type[_Kind], *, types: tuple[type, ...] = (), str_keys: bool = False) -> _Kind:
    """Call msgspec.convert; `types` are its `builtin_types`. Raises msgspec.ValidationError. Thread-safe."""
    with _preparing:
        return msgspec.convert(value, kind, builtin_types=types, str_keys=str_keys)
