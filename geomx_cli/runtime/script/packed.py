"""What `state_dict` returns, as JSON values and named arrays, and back; nothing is pickled."""

from collections import Counter, OrderedDict, defaultdict, deque
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

_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: Mapping[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_FACTORIES: Mapping[str, Any] = {"None": None} | {
    kind.__name__: kind for kind in (bool, int, float, str, tuple, list, dict, set, OrderedDict, Counter, deque)
}
"""Of a defaultdict; others are functions of the script."""
_LARGE = 1 << 63  # integers beyond become text


def pack(value: Any, name: str, to_array: ToArray) -> State:
    """Return the state of a tree of dicts, lists, tuples, sets, numbers, text, None, and arrays of numpy or others.
    Of the dicts and sequences of `collections` it has the types too, with the limit of a deque.

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
        if isinstance(item, defaultdict):
            factory = getattr(item.default_factory, "__name__", "None")
            if _FACTORIES.get(factory, packed) is not item.default_factory:
                what = f"{where} is a defaultdict of {item.default_factory!r}, which cannot be saved"
                raise InvalidSettings(what, f"make it a dict, or a defaultdict of one of {', '.join(_FACTORIES)}")
            return {"defaultdict": [factory, packed(dict(item), where)]}
        if isinstance(item, deque):
            return {"deque": [item.maxlen, packed(list(item), where)]}
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
            return {type(item).__name__: keep(np.frombuffer(item, np.uint8))}
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
        if kind == "defaultdict":
            factory, pairs = content
            return defaultdict(_FACTORIES[factory], unpacked(pairs))
        if kind == "deque":
            longest, members = content
            return deque(unpacked(members), longest)
        if kind == "int":
            return int(content)
        if kind == "value":
            key, about = content
            return from_array(state.arrays[key], about)
        array = state.arrays[content]
        if kind in ("bytes", "bytearray"):
            return array.tobytes() if kind == "bytes" else bytearray(array.tobytes())
        return array.copy() if kind == "array" else array.reshape(()).copy()[()]

    return unpacked(state.values["tree"])
