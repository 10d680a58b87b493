"""The process group of scripts written for torchrun: collectives over the job's servers instead of NCCL or gloo."""

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed import ProcessGroup, ReduceOp

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.futures import after
from geomx_cli.runtime.frontends.torch import reductions
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.collective_checks import check_parts, check_whole
from geomx_cli.runtime.frontends.torch.futures import PendingWork, done_work, joined
from geomx_cli.runtime.frontends.torch.gradient_sums import GradientSums, in_pass
from geomx_cli.runtime.frontends.torch.group_rounds import GroupRounds, size_class
from geomx_cli.runtime.frontends.torch.model_state import EXCHANGED
from geomx_cli.runtime.frontends.torch.refusals import Refusals
from geomx_cli.runtime.frontends.torch.tensor_bytes import check_dense, of_bytes, read_bytes, write_bytes

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["NAME", "GeomxProcessGroup"]

NAME = "geomx"
"""What torch.distributed.get_backend returns."""
_PASSES = 3
_CALLED = ("_allgather_base", "_reduce_scatter_base", "_set_group_name")
"""Names of methods that PyTorch calls, besides those without an underscore."""
_ADVICE = "divide the data with torch.utils.data.DistributedSampler, and call its set_epoch in each epoch"


def _untraced(group: type["GeomxProcessGroup"]) -> type["GeomxProcessGroup"]:
    """Keep torch.compile from tracing the methods that PyTorch calls in the forward pass of a compiled
    DistributedDataParallel. This imports torch._dynamo, as DistributedDataParallel and torch.optim do anyway.
    """
    for name, method in list(vars(group).items()):
        if inspect.isfunction(method) and (not name.startswith("_") or name in _CALLED):
            setattr(group, name, torch.compiler.disable(method))
    return group


@_untraced
class GeomxProcessGroup(Refusals, ProcessGroup):  # type: ignore[misc, unused-ignore]
    """All training workers, by global rank. `rounds`: what it exchanges.

    Every operation returns at once with a PendingWork, whose `wait` raises the client's error after the job has failed.
    Sums and means of floats are added by the servers, in rank order; `--compress` applies to those of a backward pass
    with more than 8192 elements, as DistributedDataParallel's buckets. Everything else is exact: bytes are copied, and
    other reductions computed by each worker. At the end of a backward pass all sums that it began are complete.
    """

    def __init__(self, client: "Client", session: "ScriptSession", group: int) -> None:
        super().__init__(client.global_rank, client.num_all_workers)
        self._name = ""
        self.rounds = GroupRounds(client, group)
        check = BatchCheck(session, _PASSES if self.size() > 1 else 0, _ADVICE, self._gather_digest)
        self._gradients = GradientSums(self.rounds, check)
        self._encodes = any(client.settings.text(name) not in ("", "none") for name in ("compress", "compress_lan"))

    def _gather_digest(self, digest: "Array") -> "Future[Array] | None":
        gathered = self.rounds.gather(digest, "batches")
        return None if self.rank() else gathered

    @property
    def passes(self) -> int:
        """Backward passes that have begun a sum."""
        return self._gradients.passes

    def in_next_pass(self, action: Callable[[], None]) -> None:
        """Call `action` in the next backward pass that sums something, before the first sum."""
        self._gradients.in_next_pass(action)

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        """The name of the backend."""
        return NAME

    # PyTorch keeps the name of a group in its backends, of which a group in Python has none.

    @property
    def group_name(self) -> str:
        """The name under which functional collectives, device meshes and torch.compile find this group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    # Reductions.

    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> PendingWork:
        """Reduce each tensor in place. Raises InvalidSettings for an unsupported operation."""
        operation = ReduceOp.SUM if opts is None else opts.reduceOp
        return joined([self._reduce("all_reduce", tensor, tensor, operation) for tensor in tensors], tensors)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> PendingWork:
        """See `allreduce`."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Any], opts: Any) -> PendingWork:
        """Reduce into the tensors of one worker; those of the others stay as they are."""
        receives, call = opts.rootRank == self.rank(), f"reduce to {opts.rootRank}"
        # A copy, as those that receive nothing must choose the same way as the one that does.
        works = [self._reduce(call, tensor.clone(), tensor if receives else None, opts.reduceOp) for tensor in tensors]
        return joined(works, tensors)

    def reduce_scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> PendingWork:
        """Reduce lists of a tensor for each worker, which may differ in size; each keeps its own."""
        works = []
        for output, parts in zip(outputs, inputs, strict=True):
            sizes, call = [part.numel() for part in parts], "reduce_scatter"
            own = sizes[self.rank()] if len(sizes) == self.size() else -1
            if output.numel() != own:
                what = f"torch.distributed.{call} of tensors of {sizes} elements to an output of {output.numel()}"
                hint = f"give {self.size()} tensors, one for each worker, and an output as large as that of this worker"
                raise InvalidSettings(what, hint)
            if set(sizes) != {own}:
                call += " to " + "+".join(map(str, sizes))
            whole = torch.cat([part.detach().reshape(-1) for part in parts])
            works.append(self._reduce_part(call, output, whole, sum(sizes[: self.rank()]), opts))
        return joined(works, outputs)

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any) -> PendingWork:
        """Reduce a tensor of a part for each worker; each keeps its own."""
        call, size = "reduce_scatter", output.numel()
        check_whole(call, whole, size * self.size(), "input")
        return self._reduce_part(call, output, whole.detach().clone().reshape(-1), self.rank() * size, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], wholes: Sequence[Any], opts: Any) -> PendingWork:
        """See `reduce_scatter_single`."""
        works = [self.reduce_scatter_single(output, whole, opts) for output, whole in zip(outputs, wholes, strict=True)]
        return joined(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_part(self, call: str, output: Any, whole: Any, first: int, opts: Any) -> PendingWork:
        """Reduce `whole` (1-D), which changes; its elements from `first` on become `output`."""
        reduced = self._reduce(call, whole, whole, opts.reduceOp)

        def keep() -> None:
            output.detach().copy_(whole[first : first + output.numel()].view(output.shape))

        return PendingWork(reduced.done, [output], keep)

    def _reduce(self, call: str, tensor: Any, out: Any | None, operation: Any) -> PendingWork:
        """Reduce `tensor` over all workers, to `out` if given, which is `tensor` itself in all workers or in none."""
        name = reductions.name_of(operation, tensor.dtype)
        outs = [] if out is None else [out]
        if not tensor.numel():
            return done_work(outs)
        adds = name in ("SUM", "AVG") and tensor.dtype in EXCHANGED and tensor.layout == torch.strided
        divisor = self.size() if name == "AVG" else 1
        if adds and out is tensor and self._gradients.takes(tensor):
            return self._gradients.begin(tensor, divisor)
        call = f"{call} {name} {_described(tensor)}"
        if adds and not self._encodes:
            return self._padded_sum(call, tensor, outs, divisor)
        gathered = self._agreed(call, self.rounds.gather(read_bytes(tensor)))

        def store() -> None:
            rows = [of_bytes(np.ascontiguousarray(row), tensor.dtype) for row in gathered.result()]
            result = reductions.combine(name, rows)
            for each in outs:
                each.detach().copy_(result.view(each.shape))

        return self._gradients.in_pass(PendingWork(gathered, outs, store))

    def _padded_sum(self, call: str, tensor: Any, outs: Sequence[Any], divisor: int) -> PendingWork:
        size, kind = tensor.numel(), EXCHANGED[tensor.dtype]
        whole = torch.zeros(size_class(size), dtype=kind, device="cpu")
        whole[:size].copy_(tensor.detach().reshape(-1))
        elements = whole.numpy()
        self._gradients.observe(elements)
        summed = self._agreed(call, self.rounds.sum("sum", elements))

        def store() -> None:
            result = whole[:size].div_(divisor) if divisor > 1 else whole[:size]
            for each in outs:
                each.detach().copy_(result.view(each.shape))

        return self._gradients.in_pass(PendingWork(summed, outs, store))

    # Copies.

    def broadcast(self, tensors: Sequence[Any], opts: Any) -> PendingWork:
        """Copy the tensors of the worker of rank opts.rootRank to all."""
        works = []
        for tensor in tensors:
            own, out = (read_bytes(tensor), None) if opts.rootRank == self.rank() else (None, tensor)
            call = f"broadcast from {opts.rootRank} {_described(tensor)}"
            works.append(self._receive(call, opts.rootRank, own, out, _bytes(tensor)))
        return joined(works, tensors)

    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> PendingWork:
        """Copy a tensor from one worker to each."""
        (output,), own = outputs, None
        if opts.rootRank == self.rank():
            check_parts("scatter", inputs[0], output.numel(), self.size())
            own = np.concatenate([read_bytes(part) for part in inputs[0]])
        call, size = f"scatter from {opts.rootRank} {_described(output)}", _bytes(output)
        return self._receive(call, opts.rootRank, own, output, size * self.size(), self.rank() * size)

    def _receive(self, call: str, source: int, own: Any, out: Any | None, size: int, first: int = 0) -> PendingWork:
        """Copy `size` bytes of one worker, of which those from `first` on become `out`."""
        outs = [] if out is None else [out]
        if not size:
            return done_work(outs)
        received = self._agreed(call, self.rounds.broadcast(source, own, size))

        def store() -> None:
            for each in outs:
                write_bytes(each, received.result()[first : first + _bytes(each)])

        return PendingWork(received, outs, store)

    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> PendingWork:
        """Copy a tensor of each worker to all."""
        works = [self._gather("all_gather", given, found) for given, found in zip(inputs, outputs, strict=True)]
        return joined(works, [tensor for found in outputs for tensor in found])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> PendingWork:
        """Copy some tensors of each worker to all; outputs: a list of them for each worker."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> PendingWork:
        """Copy a tensor of each worker to all, one after another into one tensor."""
        check_whole("all_gather", output, given.numel() * self.size(), "output")
        if not given.numel():
            return done_work([output])
        gathered = self._agreed(f"all_gather {_described(given)}", self.rounds.gather(read_bytes(given)))

        def store() -> None:
            write_bytes(output, gathered.result().reshape(-1))

        return PendingWork(gathered, [output], store)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> PendingWork:
        """See `all_gather_single`."""
        works = [self.all_gather_single(output, given) for output, given in zip(outputs, inputs, strict=True)]
        return joined(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> PendingWork:
        """Copy a tensor of each worker to one of them."""
        call = f"gather to {opts.rootRank}"
        return self._gather(call, inputs[0], outputs[0] if opts.rootRank == self.rank() else None)

    def _gather(self, call: str, given: Any, outs: Sequence[Any] | None) -> PendingWork:
        if not given.numel():
            return done_work(outs or [])
        gathered = self._agreed(f"{call} {_described(given)}", self.rounds.gather(read_bytes(given)))

        def store() -> None:
            if outs is None:
                return
            # Not before: other workers' tensors may have other sizes, which the comparison of calls tells to all.
            check_parts(call, outs, given.numel(), self.size())
            for each, row in zip(outs, gathered.result(), strict=True):
                write_bytes(each, np.ascontiguousarray(row))

        return PendingWork(gathered, outs or [], store)

    def barrier(self, opts: Any = None) -> PendingWork:
        """Complete once all workers have called this."""
        return PendingWork(self.rounds.agree("barrier"), [], lambda: None)

    def _agreed(self, call: str, data: "Future[Any]") -> "Future[Any]":
        """`data`, if all workers have made this call; else an error in all of them. Within a backward pass that is
        known already.
        """
        return data if in_pass() else after([data, self.rounds.agree(call)], data.result)


def _described(tensor: Any) -> str:
    return f"of {str(tensor.dtype).removeprefix('torch.')} x {tensor.numel()}"


def _bytes(tensor: Any) -> int:
    check_dense(tensor)
    size: int = tensor.numel() * tensor.element_size()
    return size
