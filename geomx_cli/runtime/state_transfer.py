"""Transfers the optimizer state between a worker and all roots. For the training thread; every call blocks."""

import time
from typing import TYPE_CHECKING

from geomx_cli.core.errors import InvalidSettings, TimedOut
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.cluster.bodies import Body
from geomx_cli.ps.optim.serialized_arrays import SerializedArrays, deserialize, digest
from geomx_cli.runtime.optimizer_state_file import Cut, SavedState

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client

__all__ = ["fetch", "restore"]


_PAUSE = 0.1


def fetch(client: "Client") -> SavedState:
    """Return the roots' optimizer state after all rounds that this worker has begun.

    While the other workers wait for this one's next contribution, that is the state after a round; if parties train
    asynchronously, slices are consistent only individually. If another worker loads a state concurrently, the result is
    entirely the old or entirely the new one. Raises InvalidSettings if there is no optimizer.
    """
    client.settle()
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

    Keys not in it start without state. Raises InvalidSettings, with nothing changed, if it is another optimizer's or
    does not match the keys; slice boundaries may differ.
    """
    client.settle()
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
