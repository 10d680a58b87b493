"""Converts trees of MXNet's arrays, and the state of its optimizers, to data for any file or message, and back."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.script.packed import pack, unpack
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = [
    "attributes", "fill", "is_arrays", "load_updater", "pack_state", "set_attributes", "unpack_state", "updater_state",
]  # fmt: skip

_OF_SCRIPT = ("param_dict", "sym_info", "idx2name", "_index_update_count")
"""Attributes of an optimizer that come from its script, or that it has twice."""
_COUNTS = "_all_index_update_counts"


def pack_state(value: Any, name: str) -> State:
    """See `pack`. The tree may have dense arrays of MXNet."""
    return pack(value, name, _to_array)


def unpack_state(state: State) -> Any:
    """Return the tree of a `pack_state`. Its arrays are on the devices on which they were."""
    return unpack(state, _from_array)


def _to_array(value: Any) -> tuple[Array, Any] | None:
    mx = load_mxnet()
    if not isinstance(value, mx.nd.NDArray):
        return None
    if value.stype != "default":
        raise InvalidSettings(f"an array of storage type {value.stype} cannot be saved", "save dense arrays")
    array = value.asnumpy()
    is_np = isinstance(value, mx.np.ndarray)
    where = [value.context.device_type, value.context.device_id]
    return array.reshape(-1).view(np.uint8), [array.dtype.name, list(array.shape), where, is_np]


def _from_array(array: Array, about: Any) -> Any:
    mx = load_mxnet()
    dtype, shape, (device, index), is_np = about
    content = np.ascontiguousarray(array).view(dtype).reshape(shape)
    make = mx.np.array if is_np else mx.nd.array
    return make(content, ctx=mx.Context(device, index), dtype=dtype)


def is_arrays(value: Any) -> bool:
    """Whether it is an array of MXNet or numpy, or a list, tuple or dict of nothing else."""
    if isinstance(value, (list, tuple, Mapping)):
        items = list(value.values()) if isinstance(value, Mapping) else value
        return bool(items) and all(is_arrays(item) for item in items)
    return isinstance(value, (np.ndarray, load_mxnet().nd.NDArray))


def fill(arrays: Any, found: Any, name: str) -> None:
    """Write the saved content of such a tree to its arrays. Raises InvalidSettings if the tree has other arrays."""
    if isinstance(arrays, (list, tuple, Mapping)):
        keys = list(arrays) if isinstance(arrays, Mapping) else range(len(arrays))
        if len(keys) != len(found):
            raise InvalidSettings(f"{name} had {len(found)} arrays when it was saved, and now {len(keys)}", _SAME)
        for key in keys:
            fill(arrays[key], found[key], f"{name}[{key!r}]")
        return
    if arrays.shape != found.shape:
        raise InvalidSettings(f"{name} had the shape {found.shape} when it was saved, and now {arrays.shape}", _SAME)
    arrays[:] = found


_SAME = "give geomx.state the same objects each time that the script runs"


def attributes(thing: Any, name: str) -> dict[str, Any]:
    """Return the state of an optimizer or a schedule as a tree for `pack_state`, which refuses values that it cannot
    save.
    """
    if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
        return {"state_dict": thing.state_dict()}
    found: dict[str, Any] = {}
    for attribute, value in vars(thing).items():
        if _has_attributes(value):
            found[attribute] = {"attributes": attributes(value, f"{name}.{attribute}")}
        elif attribute not in _OF_SCRIPT and not callable(value):
            found[attribute] = {"value": value}
    if _COUNTS in found:  # only the counts of one device are in use
        devices = getattr(thing, _COUNTS)
        found["device"] = next((key for key, counts in devices.items() if counts is thing._index_update_count), 0)
    return found


def set_attributes(thing: Any, found: Mapping[str, Any]) -> None:
    """Continue from `attributes`."""
    if "state_dict" in found:
        thing.load_state_dict(found["state_dict"])
        return
    for attribute, item in found.items():
        if attribute == "device":
            thing._index_update_count = getattr(thing, _COUNTS)[item]
        elif "attributes" in item:
            set_attributes(getattr(thing, attribute), item["attributes"])
        else:
            setattr(thing, attribute, item["value"])


def _has_attributes(value: Any) -> bool:
    mx = load_mxnet()
    return isinstance(value, (mx.optimizer.Optimizer, mx.lr_scheduler.LRScheduler))


def updater_state(updater: Any, name: str) -> State:
    """The state that one of MXNet's updaters keeps for each weight."""
    return pack_state(updater.states, name)


def load_updater(updater: Any, state: State) -> None:
    """Continue from `updater_state`."""
    updater.states = unpack_state(state)
    updater.states_synced = dict.fromkeys(updater.states, False)
