"""What `state_dict` returns, as JSON values and named arrays, and back; nothing is pickled."""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["ToArray", "FromArray", "pack", "unpack"]

ToArray = Callable[[Any], tuple[Array, Any] | None]
"""Returns a value of the framework as an array and a JSON value that describes it; None for any other value."""
FromArray = Callable[[Array, Any], Any]
"""Returns the value of which `ToArray` made these."""

_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
_MAPPINGS: Mapping[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LARGE = 1 << 63  # integers beyond become text


def pack(value: Any, name: str, to_array: ToArray) -> State:
    """Return the state of a tree of dicts, lists, tuples, sets, numbers, text, None, and arrays of numpy or others.

    name: for messages. The arrays are the tree's own memory where possible.
    Raises InvalidSettings for any other value, which it names.
    """
    arrays: dict[str, Array] = {}

    def keep(array: Array) -> str:
        key = str(len(arrays))
        arrays[key] = array
        return key

    def packed(item: Any, where: str) -> Any:
        if item is None or isinstance(item, bool | str) or type(item) is float:
            return item
        if type(item) is int:
            return int(item) if -_LARGE < item < _LARGE else {"int": str(item)}
        if isinstance(item, list):
            return [packed(each, f"{where}[{index}]") for index, each in enumerate(item)]
        if isinstance(item, Mapping):
            kind = type(item).__name__ if type(item).__name__ in _MAPPINGS else "dict"
            return {kind: [[packed(key, where), packed(each, f"{where}[{key!r}]")] for key, each in item.items()]}
        if (kind := type(item).__name__) in _SEQUENCES or isinstance(item, tuple):
            kind = kind if kind in _SEQUENCES else "tuple"
            return {kind: [packed(each, f"{where}[{index}]") for index, each in enumerate(item)]}
        if (found := to_array(item)) is not None:
            array, about = found
            return {"value": [keep(array), about]}
        if isinstance(item, bytes | bytearray):
            return {"bytes": keep(np.frombuffer(item, np.uint8))}
        if isinstance(item, np.ndarray | np.generic) and not item.dtype.hasobject:
            return {"array" if isinstance(item, np.ndarray) else "scalar": keep(np.asarray(item))}
        what = f"{where} is a {type(item).__module__}.{type(item).__qualname__}, which cannot be saved"
        raise InvalidSettings(what, "let state_dict return numbers, text, lists, dicts, tensors and arrays only")

    return State({"tree": packed(value, name)}, arrays)


def unpack(state: State, from_array: FromArray) -> Any:
    """Return the tree of which `pack` made the state, in memory of its own."""

    def unpacked(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return [unpacked(each) for each in item]
        if not isinstance(item, dict):
            return item
        ((kind, content),) = item.items()
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({unpacked(key): unpacked(each) for key, each in content})
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](unpacked(each) for each in content)
        if kind == "int":
            return int(content)
        if kind == "value":
            key, about = content
            return from_array(state.arrays[key], about)
        array = state.arrays[content]
        if kind == "bytes":
            return array.tobytes()
        return array.copy() if kind == "array" else array.reshape(()).copy()[()]

    return unpacked(state.values["tree"])
