"""The optimizer state of a whole model, its file, and its way between a worker and all roots.

The file is numpy's .npz without pickle. Arrays are named KEY/OFFSET/WHAT: the optimizer's state for the elements of a
key from OFFSET on, which were one slice at the servers. The entry "geomx" is JSON: the optimizer, its hyper-parameters,
and the slices of each key.
"""

import json
import os
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from geomx_cli.core.errors import InvalidSettings, TimedOut
from geomx_cli.core.files import open_atomic
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.optim.optimizer import SerializedArrays, deserialize, digest

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["Cut", "SavedState", "fetch", "read", "restore", "write"]

Cut = tuple[int, int]
"""Elements [offset, offset + length) of a key."""

_FORMAT = 1
_ABOUT = "geomx"


@dataclass(slots=True)
class SavedState:
    """An optimizer's name, hyper-parameters and state.

    dtypes: by key.
    slices: by key, the arrays of each cut by name, {} before its first update: `step`, int64 of shape (1,), and arrays
        with as many elements as the cut.
    counts: a worker's own update counts by key, if the hyper-parameters are to be restored with the state; else None.
    """

    optimizer: str
    params: dict[str, float | bool]
    dtypes: dict[str, str] = field(default_factory=dict)
    slices: dict[str, dict[Cut, dict[str, Array]]] = field(default_factory=dict)
    counts: dict[int | str, int] | None = None

    def cut(self, key: str, cut: Cut) -> dict[str, Array]:
        """Return the state of one slice, whose boundaries may differ from the saved ones.

        Raises InvalidSettings if the saved slices are inconsistent: saved when only part of the key had been updated.
        """
        slices, (start, length) = self.slices[key], cut
        if cut in slices:
            return slices[cut]
        stop = start + length
        parts = [(at, size, kept) for (at, size), kept in sorted(slices.items()) if at < stop and at + size > start]
        covered = sum(min(stop, at + size) - max(start, at) for at, size, _ in parts)
        if covered != length or len({frozenset(kept) for _, _, kept in parts}) != 1:
            raise InvalidSettings(f"the saved state of key {key!r} does not fit its slices", "it has another size here")
        found = {}
        for what in parts[0][2]:
            pieces = [kept[what][max(start - at, 0) : stop - at] for at, _, kept in parts]
            found[what] = parts[0][2][what] if what == "step" else np.concatenate(pieces)
        return found


def write(path: Path, state: SavedState) -> None:
    """Write a file atomically. Raises InvalidSettings on failure."""
    about = {
        "format": _FORMAT,
        "optimizer": state.optimizer,
        "params": state.params,
        "counts": None if state.counts is None else list(state.counts.items()),
        "keys": {key: {"dtype": state.dtypes[key], "cuts": list(cuts)} for key, cuts in state.slices.items()},
    }
    entries = {_ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}
    for key, cuts in state.slices.items():
        for (offset, _), kept in cuts.items():
            entries |= {f"{key}/{offset}/{what}": array for what, array in kept.items()}
    try:
        with open_atomic(path) as file:
            np.savez(file, **entries)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidSettings(f"cannot write {path}: {error.strerror}", "free space or fix permissions") from None


def read(path: Path) -> SavedState:
    """Read a file. Raises InvalidSettings if it is missing, damaged or of another kind."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return _state(file)
    except OSError as error:
        what = f"cannot read {path}: {error.strerror or error}"
        raise InvalidSettings(what, "see that it is there, on this host") from None
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        message = f"{path} is no whole file of optimizer states: {error}"
        raise InvalidSettings(message, "save_optimizer_states writes one") from None


def _state(file: Any) -> SavedState:
    about = json.loads(file[_ABOUT].tobytes())
    if about["format"] != _FORMAT:
        raise ValueError(f"it has format {about['format']}")
    keys: dict[str, Any] = about["keys"]
    kept: dict[tuple[str, int], dict[str, Array]] = {}
    for name in file.files:
        if name != _ABOUT:
            key, offset, what = name.rsplit("/", 2)
            kept.setdefault((key, int(offset)), {})[what] = file[name]
    slices = {
        key: {(int(at), int(size)): kept.get((key, at), {}) for at, size in item["cuts"]} for key, item in keys.items()
    }
    for cuts in slices.values():
        for (_, size), arrays in cuts.items():
            wrong = [what for what, array in arrays.items() if array.shape != ((1,) if what == "step" else (size,))]
            if wrong:
                raise ValueError(f"{wrong[0]!r} has another shape than its slice")
    counts = about["counts"]
    return SavedState(
        optimizer=str(about["optimizer"]),
        params=dict(about["params"]),
        dtypes={key: str(item["dtype"]) for key, item in keys.items()},
        slices=slices,
        counts=None if counts is None else {key: int(number) for key, number in counts},
    )


# Transfer between a worker and all roots. For the training thread; every call blocks.

_PAUSE = 0.1


def fetch(client: "Client") -> SavedState:
    """Return the roots' optimizer state after all rounds that this worker has begun.

    While the other workers wait for this one's next contribution, that is the state after a round; if parties train
    asynchronously, slices are consistent only individually. If another worker loads a state concurrently, the result is
    entirely the old or entirely the new one. Raises InvalidSettings if there is no optimizer.
    """
    client.await_rounds()
    found = SavedState("", {})
    where: dict[tuple[str, str], tuple[str, Cut]] = {}
    for name, declared in client.tensors.items():
        placement = declared.placement
        cuts = [(item.offset, item.length) for item in placement.slices]
        where |= {(str(placement.key), str(index)): (name, cut) for index, cut in enumerate(cuts)}
        found.dtypes[name] = placement.tensor.dtype
        found.slices[name] = {cut: {} for cut in cuts}
    for root, opened in _open(client).items():
        found.optimizer, found.params = str(opened["optimizer"]), dict(opened["params"])
        for name, array in _read(client, root, int(opened["size"])).items():
            key, index, what = name.split("/", 2)
            tensor, cut = where[key, index]
            found.slices[tensor][cut][what] = array
    if not found.optimizer:
        raise InvalidSettings("no key has been initialised", "call init first")
    return found


def restore(client: "Client", state: SavedState) -> None:
    """Restore the roots' optimizer state from `state`, before the next round that this worker contributes to.

    Keys that `state` lacks start without state. Raises InvalidSettings, with nothing changed, if `state` is from
    another optimizer or does not match the keys. Slice boundaries may differ.
    """
    client.await_rounds()
    _check(client, state)
    parts: dict[int, dict[str, Array]] = {root: {} for root in _roots(client)}
    for name, declared in client.tensors.items():
        placement = declared.placement
        for index, piece in enumerate(placement.slices if name in state.slices else ()):
            kept = state.cut(name, (piece.offset, piece.length))
            parts[piece.root] |= {f"{placement.key}/{index}/{what}": array for what, array in kept.items()}
    packed = {root: SerializedArrays(named) for root, named in parts.items()}
    whole = digest("".join(part.digest() for part in packed.values()).encode())
    for root, part in packed.items():
        _write(client, root, {"optimizer": state.optimizer, "whole": whole}, part)


def _roots(client: "Client") -> list[int]:
    """Return the roots that own slices."""
    return sorted({piece.root for declared in client.tensors.values() for piece in declared.placement.slices})


def _open(client: "Client") -> dict[int, Body]:
    """Open a snapshot at each root with slices and return their answers; all must have loaded the same state last."""
    limit = time.monotonic() + client.settings.number("patience")
    while True:
        opened = {root: client.control.request("state_open", {"by": client.process}, root) for root in _roots(client)}
        if len({answer["loaded"] for answer in opened.values()}) <= 1:
            return opened
        if time.monotonic() > limit:
            what = "the servers have taken up parts of different optimizer states"
            raise TimedOut(what, "let one worker load the states, or all the same file")
        time.sleep(_PAUSE)


def _read(client: "Client", root: int, size: int) -> dict[str, Array]:
    run = bytearray()
    while len(run) < size:
        piece = client.control.request("state_read", {"by": client.process, "at": len(run)}, root)["piece"]
        if not piece:
            raise InvalidSettings(f"global server {root} has less state than announced")
        run += piece
    client.control.request("state_close", {"by": client.process}, root)
    return deserialize(run)


def _write(client: "Client", root: int, about: Body, packed: SerializedArrays) -> None:
    patience = client.settings.number("patience")
    limit = time.monotonic() + patience
    body = {**about, "by": client.process, "digest": packed.digest(), "size": packed.size}
    while (go := client.control.request("state_begin", body, root)["go"]) == "wait":
        if time.monotonic() > limit:
            what = f"waited {patience:g} s for another worker to load the optimizer's state"
            raise TimedOut(what, "have one worker load it, and the others wait at a barrier")
        time.sleep(_PAUSE)
    for at, piece in packed.pieces() if go == "on" else ():
        client.control.request("state_write", {"by": client.process, "at": at, "piece": piece}, root)


def _check(client: "Client", state: SavedState) -> None:
    for key, dtype in state.dtypes.items():
        declared = client.tensors.get(key)
        if declared is None:
            raise InvalidSettings(f"the saved state has a key {key!r}, which has not been initialised")
        size, tensor = sum(length for _, length in state.slices[key]), declared.placement.tensor
        if (size, dtype) != (tensor.size, tensor.dtype):
            raise InvalidSettings(
                f"key {key!r} has {tensor.size} elements of {tensor.dtype}, and {size} of {dtype} in the saved state"
            )
