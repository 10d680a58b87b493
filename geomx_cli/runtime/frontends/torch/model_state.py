"""The tensors of a script's model: which are trained, and how all are copied from one worker to the others."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Array
from geomx_cli.ps.client import Client
from geomx_cli.ps.cluster.partition import Tensor
from geomx_cli.ps.net.wire import EVERY
from geomx_cli.runtime.frontends.torch.tensors import EXCHANGED, is_divided, local, plain

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.party_group import PartyGroup

__all__ = ["Broadcast", "ModelState", "PartyBroadcast", "Shard", "check_layout"]


class Broadcast:
    """Copies bytes and tensors from one worker to all others, exactly, because initial values are never encoded.

    Blocks. All workers make the same calls. Raises the client's error after the job has failed.

    source: the worker's global rank; by default, the worker that provides the initial values.
    shard: of the keys, see Tensor.
    is_source: whether this worker is the source.
    """

    def __init__(self, client: Client, source: int | None = None, shard: int = EVERY) -> None:
        self._client = client
        self._shard = shard
        self._source = client.late_source if source is None else source
        self.is_source = client.is_master if self._source is None else client.global_rank == self._source

    def arrays(self, values: dict[str, Array]) -> None:
        """Declare keys of these names, and write the source's values to all workers' arrays. The arrays are 1-D,
        contiguous, of float16, float32 or float64, and have equal sizes in all workers.
        """
        client = self._client
        tensors = [Tensor(name, value.size, str(value.dtype), shard=self._shard) for name, value in values.items()]
        client.declare(tensors)
        client.init(values, source=self._source)
        if not self.is_source:
            for future in [client.pull(name, value) for name, value in values.items()]:
                future.result()

    def data(self, name: str, content: bytes) -> bytes:
        """Return the source's `content`, of any length, on all workers. The keys NAME and NAME.size must be new."""
        size = np.array([len(content)], np.float64)
        self.arrays({f"{name}.size": size})
        length = int(size[0])
        padded = np.zeros(-(-length // 4) * 4, np.uint8)
        if self.is_source:
            padded[:length] = np.frombuffer(content, np.uint8)
        if length:
            self.arrays({name: padded.view(np.float32)})
        return padded[:length].tobytes()


class PartyBroadcast(Broadcast):
    """Like Broadcast: through the servers between the leaders of parties, and within each party by its process group.

    between: the leaders' Broadcast; None in other workers.
    origin: the source's rank in its party.
    """

    def __init__(self, group: "PartyGroup", between: Broadcast | None, origin: int = 0) -> None:
        self._group = group
        self._between = between
        self._own = bool(group.share(int(between is not None and between.is_source)))
        self._origin = origin if self._own else 0
        self.is_source = self._own and group.rank == self._origin

    def arrays(self, values: dict[str, Array]) -> None:
        """See Broadcast. The source leads its party."""
        if self._between is not None:
            self._between.arrays(values)
        for value in values.values():
            if value.size:
                self._group.wait(self._group.send(torch.from_numpy(value)))

    def data(self, name: str, content: bytes) -> bytes:
        """See Broadcast."""
        if self._own and self._origin:
            content = self._group.share_bytes(content, self._origin)
        if self._between is not None:
            content = self._between.data(name, content)
        return self._group.share_bytes(content)


_ROUNDING = 1e-2
"""The largest difference that rounding explains, relative to the largest element of a tensor."""
_TINY = 1e-6


@dataclass(frozen=True)
class Shard:
    """The part of a model that fully_shard has left to a worker: shard `index` of `count`, in a party of `workers`."""

    index: int
    count: int
    workers: int


class ModelState:
    """The tensors of `model` by name. A tensor that modules share is contained once.

    trained: the tensors that `optimizer` updates. They have a floating dtype and elements, in a shard within the shard.
    others: the other parameters, and `buffers`.
    prefix: of the names of keys; includes the shard's prefix.

    Raises InvalidSettings for parameters of the optimizer that the model does not have, for tensors that cannot be
    exchanged, and for a model that is not divided as the job is.
    """

    def __init__(self, model: Any, optimizer: Any, prefix: str = "", shard: Shard | None = None) -> None:
        self.prefix = prefix if shard is None else f"{prefix}shard{shard.index}/"
        self.model = model
        self.optimizer = optimizer
        updated = {id(item): None for item in self._in_groups()}
        self._updated = [id(item) for item in self._in_groups()]
        self._known = {id(item) for item in model.parameters()}
        self._looked = False
        self._frozen: dict[str, Any] = {}
        self.trained: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            trains = parameter.requires_grad and id(parameter) in updated and parameter.numel() > 0
            (self.trained if trains else self.others)[name] = parameter
            if id(parameter) in updated and not parameter.requires_grad:
                self._frozen[name] = parameter
            updated.pop(id(parameter), None)
        self.buffers = {name: tensor for name, tensor in model.named_buffers() if tensor.numel()}
        self.others |= self.buffers
        if updated:
            what = f"{len(updated)} parameters of the optimizer are not in the model"
            raise InvalidSettings(what, "pass wrap the module that has all of them, and create the optimizer from it")
        if not self.trained:
            raise InvalidSettings("the optimizer updates no parameter of the model", "unfreeze some before wrap")
        for name, tensor in (*model.named_parameters(), *self.buffers.items()):
            _check_memory(name, tensor)
        for name, parameter in self.trained.items():
            if shard is not None:
                check_layout(name, parameter, shard.workers, shard.count)
            elif is_divided(parameter):
                what = f"parameter {name} is a DTensor, divided over several processes"
                raise InvalidSettings(what, "launch with --reduce torch --shards N, of N shards in each party")
            if parameter.dtype not in EXCHANGED:
                what = f"parameter {name} is of {plain(parameter.dtype)}"
                raise InvalidSettings(what, "train parameters of float32, float64, float16 or bfloat16")
        if shard is not None:
            self.trained = {name: parameter for name, parameter in self.trained.items() if local(parameter).numel()}
            if not self.trained:
                what = f"shard {shard.index} has no element of the parameters that are trained"
                raise InvalidSettings(what, "divide the model into fewer shards")

    def check_unchanged(self) -> None:
        """Raise InvalidSettings if the optimizer now updates parameters that are not exchanged. Also raise it, but
        check only
        once, if the model has new parameters: this check takes as long as a step of a small model.
        """
        hint = "call wrap after the last change of the model and of the optimizer's groups"
        if [id(item) for item in self._in_groups()] != self._updated:
            raise InvalidSettings("the optimizer has other parameters than when it was wrapped", hint)
        if not self._looked:
            self._looked = True
            if added := self.added():
                raise InvalidSettings(f"the model has got parameter {added} since it was wrapped", hint)
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise InvalidSettings(f"parameter {name} has a gradient, and was frozen when it was wrapped", hint)

    def added(self) -> str:
        """The first parameter that the model has got since; "" if there is none."""
        return next((name for name, item in self.model.named_parameters() if id(item) not in self._known), "")

    def _in_groups(self) -> "Iterator[Any]":
        return (item for group in self.optimizer.param_groups for item in group["params"])

    def copy_initial(self, broadcast: Broadcast, whole: Broadcast | None = None) -> None:
        """Copy all tensors from the worker that provides the initial values. The values of the trained tensors then are
        the values of their keys. Blocks.

        whole: for tensors that are not divided; None: `broadcast`, as for the others.

        Raises InvalidSettings that names the tensor, if this worker's tensors differ from that worker's in name, dtype
        or shape. Also raises it if its optimizer differs in class, groups or state.
        """
        mine = self._manifest()
        theirs = json.loads(broadcast.data(f"{self.prefix}geomx.manifest", json.dumps(mine).encode()))
        _compare(mine, theirs)
        values = {name: _elements(tensor) for name, tensor in self.trained.items()}
        broadcast.arrays({f"{self.prefix}{name}": value for name, value in values.items()})
        for name, value in values.items():
            _fill(self.trained[name], torch.from_numpy(value))
        self._copy_each(broadcast, whole, "geomx.others", self.others)

    def copy_final(self, broadcast: Broadcast, whole: Broadcast | None = None, *, trained: bool) -> str:
        """Copy all other tensors, and with `trained` all tensors, from one worker to the others; once, at the end.
        Return the trained tensor that this has changed by more than rounding errors, or "".

        whole: see `copy_initial`.
        """
        tensors = {**(self.trained if trained else {}), **self.others}
        changed = self._copy_each(broadcast, whole, "geomx.final", tensors)
        return next(iter(changed), "")

    def _copy_each(
        self, broadcast: Broadcast, whole: Broadcast | None, name: str, tensors: Mapping[str, Any]
    ) -> list[str]:
        """Return the names of trained tensors that differed by more than rounding errors."""
        divided = {key: tensor for key, tensor in tensors.items() if whole is not None and is_divided(tensor)}
        changed = self._copy(broadcast, f"{name}.shards", divided)
        rest = {key: tensor for key, tensor in tensors.items() if key not in divided}
        return changed + self._copy(broadcast if whole is None else whole, name, rest)

    def _copy(self, broadcast: Broadcast, name: str, tensors: Mapping[str, Any]) -> list[str]:
        if not tensors:
            return []
        content = b"".join(_bytes(tensor) for tensor in tensors.values()) if broadcast.is_source else b""
        received, start = broadcast.data(f"{self.prefix}{name}", content), 0
        if broadcast.is_source:
            return []
        changed = []
        for key, tensor in tensors.items():
            count = local(tensor).numel()
            end = start + count * tensor.element_size()
            if count:
                flat = torch.frombuffer(bytearray(received[start:end]), dtype=tensor.dtype)
                if key in self.trained and _differ(local(tensor), flat):
                    changed.append(key)
                _fill(tensor, flat)
            start = end
        return changed

    def _manifest(self) -> dict[str, Any]:
        tensors = {
            name: [f"{kind}{_division(tensor)}", plain(tensor.dtype), list(tensor.shape)]
            for kind, group in (("trained", self.trained), ("not trained", self.others))
            for name, tensor in group.items()
        }
        groups = [len(group["params"]) for group in self.optimizer.param_groups]
        optimizer = [type(self.optimizer).__name__, groups, len(self.optimizer.state)]
        return {"tensors": tensors, "optimizer": optimizer}


def check_layout(name: str, parameter: Any, workers: int, shards: int) -> None:
    """Raise InvalidSettings unless fully_shard has divided a parameter into so many shards, over a party of workers."""
    if not is_divided(parameter):
        what = f"parameter {name} is not divided, in a job with --shards {shards}"
        raise InvalidSettings(what, "call fully_shard on the whole model before the optimizer is created")
    mesh = parameter.device_mesh.mesh
    if mesh.shape[-1] != shards:
        what = f"parameter {name} is divided into {mesh.shape[-1]} shards, in a job with --shards {shards}"
        raise InvalidSettings(what, f"launch with --shards {mesh.shape[-1]}, or give fully_shard another mesh")
    # Types by name, because other placements, such as tensor parallelism's, derive from these.
    kinds = [type(item).__name__ for item in parameter.placements]
    if kinds not in (["Shard"], ["Replicate", "Shard"]) or mesh.flatten().tolist() != list(range(workers)):
        what = f"parameter {name} is placed as {parameter.placements} on a mesh of shape {tuple(mesh.shape)}"
        hint = f"use fully_shard alone, on a mesh of the party's {workers} workers: (shard) or (replicate, shard)"
        raise InvalidSettings(what, hint)


def _check_memory(name: str, tensor: Any) -> None:
    """Raise InvalidSettings for a tensor without values, and for a tensor whose elements share memory."""
    own = local(tensor)
    if own.is_meta:
        hint = "call model.to_empty(device=...), and set the values or load them, before wrap"
        raise InvalidSettings(f"tensor {name} is on the device meta, and so has no values", hint)
    if any(stride == 0 and size > 1 for stride, size in zip(own.stride(), own.shape, strict=True)):
        what = f"elements of tensor {name} share memory, as after expand"
        raise InvalidSettings(what, "clone it before it becomes a part of the model")


def _compare(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raise InvalidSettings that names the first difference."""
    hint = "build the same model and optimizer in every worker, from the same options"
    for name in dict.fromkeys((*theirs["tensors"], *mine["tensors"])):
        own, other = (_described(side["tensors"].get(name)) for side in (mine, theirs))
        if own != other:
            raise InvalidSettings(f"tensor {name} is {own} here and {other} in the worker that sets the weights", hint)
    if list(mine["tensors"]) != list(theirs["tensors"]):
        raise InvalidSettings("the model's tensors have another order than in the worker that sets the weights", hint)
    (kind, groups, state), (their_kind, their_groups, their_state) = mine["optimizer"], theirs["optimizer"]
    if (kind, groups) != (their_kind, their_groups):
        what = f"the optimizer is {kind} with groups of {groups} here, and {their_kind} with {their_groups}"
        raise InvalidSettings(f"{what} in the worker that sets the weights", hint)
    if state != their_state:
        what = f"the optimizer has state of {state} parameters here, and of {their_state} in the worker that sets the"
        raise InvalidSettings(f"{what} weights", "load the same checkpoint in every worker, or in none")


def _described(entry: Any) -> str:
    return f"{entry[0]}, {entry[1]} of shape {tuple(entry[2])}" if entry else "missing"


def _elements(tensor: Any) -> Array:
    """A 1-D copy in CPU memory, in the dtype in which contributions are sent. This dtype holds each of its values."""
    copied = local(tensor).to("cpu", EXCHANGED[tensor.dtype], copy=True, memory_format=torch.contiguous_format)
    array: Array = copied.reshape(-1).numpy()
    return array


def _bytes(tensor: Any) -> bytes:
    flat = local(tensor).cpu().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else b""


@torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
def _fill(tensor: Any, flat: Any) -> None:
    own = local(tensor)
    own.copy_(flat.reshape(own.shape))


def _differ(one: Any, other: Any) -> bool:
    """Whether elements differ by more than the hardware of two workers explains."""
    own, its = one.detach().float(), other.to(one.device).reshape(one.shape).float()
    bound = _ROUNDING * float(its.nan_to_num().abs().max()) + _TINY
    return not torch.allclose(own, its, rtol=0, atol=bound, equal_nan=True)


def _division(tensor: Any) -> str:
    """How a tensor is divided within a party. The number of replicas of its shards may differ between parties."""
    return f" as {tensor.placements[-1]}" if is_divided(tensor) else ""
