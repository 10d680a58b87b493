"""The collective operations that copy: broadcast, scatter, gather, all_to_all."""

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.futures import after, finished
from geomx_cli.ps.arrays import Array
from geomx_cli.runtime.frontends.torch.ddp.futures import Lane, PendingWork, joined
from geomx_cli.runtime.frontends.torch.ddp.gradient_sums import GradientSums, in_pass
from geomx_cli.runtime.frontends.torch.ddp.group_rounds import GroupRounds, LoneRounds, check_parts, check_whole
from geomx_cli.runtime.frontends.torch.tensors import check_dense, read_bytes, write_bytes

__all__ = ["GroupCopies", "untraced"]

_CALLED = ("_allgather_base", "_reduce_scatter_base", "_set_group_name")
"""Names of methods that PyTorch calls, in addition to methods without an underscore."""


def untraced(group: type["GroupCopies"]) -> type[Any]:
    """Keep torch.compile from tracing the methods that PyTorch calls in the forward pass of a compiled
    DistributedDataParallel. This imports torch._dynamo, which DistributedDataParallel and torch.optim import anyway.
    """
    for name, method in list(vars(group).items()):
        if inspect.isfunction(method) and (not name.startswith("_") or name in _CALLED):
            setattr(group, name, torch.compiler.disable(method))
    return group


@untraced
class GroupCopies(ProcessGroup):  # type: ignore[misc, unused-ignore]
    """Copies of bytes between workers, for any dtype. Operations return at once with a PendingWork.

    rounds: the group's rounds.
    passes: the operations of backward passes.
    exchanged: number of elements that the script has given to operations so far.
    """

    def __init__(self, rounds: GroupRounds | LoneRounds, passes: GradientSums) -> None:
        super().__init__(rounds.rank, rounds.workers)
        self.rounds = rounds
        self._passes = passes
        self.exchanged = 0

    def broadcast(self, tensors: Sequence[Any], opts: Any) -> PendingWork:
        """Copy the tensors of the worker of rank opts.rootRank to all."""
        works = []
        for tensor in tensors:
            own, out = (read_bytes(tensor), None) if opts.rootRank == self.rank() else (None, tensor)
            if self.rounds.repeats:  # an earlier life of this worker may have given other bytes to all
                out = tensor
            call = f"broadcast from {opts.rootRank} {self._described(tensor)}"
            works.append(self._receive(call, opts.rootRank, own, out, _bytes(tensor)))
        return self._joined(works, tensors)

    def scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> PendingWork:
        """Copy a tensor from one worker to each."""
        (output,), own = outputs, None
        if opts.rootRank == self.rank():
            check_parts("scatter", inputs[0], output.numel(), self.size())
            own = np.concatenate([read_bytes(part) for part in inputs[0]])
        call, size = f"scatter from {opts.rootRank} {self._described(output)}", _bytes(output)
        return self._receive(call, opts.rootRank, own, output, size * self.size(), self.rank() * size)

    def _receive(self, call: str, source: int, own: Any, out: Any | None, size: int, first: int = 0) -> PendingWork:
        """Copy `size` bytes of one worker to all. The bytes from `first` on become `out`."""
        outs = [] if out is None else [out]
        if not size:
            return self._done(outs)
        received = self._agreed(call, self.rounds.broadcast(source, own, size))

        def store() -> None:
            for each in outs:
                found = received.result()[first : first + _bytes(each)]
                if own is None or not np.array_equal(found, own):
                    write_bytes(each, found)

        return self._pending(received, outs, store)

    def allgather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None) -> PendingWork:
        """Copy a tensor of each worker to all."""
        works = [self._gather("all_gather", given, found) for given, found in zip(inputs, outputs, strict=True)]
        return self._joined(works, [tensor for found in outputs for tensor in found])

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any = None
    ) -> PendingWork:
        """Copy some tensors of each worker to all. outputs: for each worker, a list of its tensors."""
        return self.allgather(list(zip(*outputs, strict=True)), inputs)

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> PendingWork:
        """Copy a tensor of each worker to all, one after another into one tensor."""
        check_whole("all_gather", output, given.numel() * self.size(), "output")
        if not given.numel():
            return self._done([output])
        gathered = self._agreed(f"all_gather {self._described(given)}", self.rounds.gather(read_bytes(given)))

        def store() -> None:
            write_bytes(output, gathered.result().reshape(-1))

        return self._pending(gathered, [output], store)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None
    ) -> PendingWork:
        """See `all_gather_single`."""
        works = [self.all_gather_single(output, given) for output, given in zip(outputs, inputs, strict=True)]
        return self._joined(works, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Sequence[Sequence[Any]], inputs: Sequence[Any], opts: Any) -> PendingWork:
        """Copy a tensor of each worker to one of them."""
        call = f"gather to {opts.rootRank}"
        return self._gather(call, inputs[0], outputs[0] if opts.rootRank == self.rank() else None)

    def _gather(self, call: str, given: Any, outs: Sequence[Any] | None) -> PendingWork:
        if not given.numel():
            return self._done(outs or [])
        gathered = self._agreed(f"{call} {self._described(given)}", self.rounds.gather(read_bytes(given)))

        def store() -> None:
            if outs is None:
                return
            # Not before: other workers' tensors may have other sizes, and the comparison of calls reports this to all
            # workers.
            check_parts(call, outs, given.numel(), self.size())
            for each, row in zip(outs, gathered.result(), strict=True):
                write_bytes(each, np.ascontiguousarray(row))

        return self._pending(gathered, outs or [], store)

    def alltoall(self, outputs: Sequence[Any], inputs: Sequence[Any], opts: Any = None) -> PendingWork:
        """Copy a tensor of each worker to each, of any size. Every worker receives the tensors of all workers."""
        for tensors, kind in ((inputs, "inputs"), (outputs, "outputs")):
            if len(tensors) != self.size():
                what = f"torch.distributed.all_to_all with {len(tensors)} {kind}"
                raise InvalidSettings(what, f"give {self.size()}, one for each worker")
        self.exchanged += sum(part.numel() for part in inputs)
        own = np.concatenate([read_bytes(part) for part in inputs])
        sizes = [part.numel() for part in (*inputs, *outputs)]

        def store(parts: Sequence[Array]) -> None:
            for each, part in zip(outputs, parts, strict=True):
                write_bytes(each, part)

        return self._all_to_all(own, sizes, inputs[0], outputs, store)

    def alltoall_base(
        self, output: Any, given: Any, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> PendingWork:
        """Copy a part of a tensor of each worker to each.

        sizes: the sizes of the parts, along the first dimension. Without sizes, the parts are equal.
        """
        sizes = []
        for tensor, given_sizes in ((given, input_sizes), (output, output_sizes)):
            rows = tensor.shape[0] if tensor.dim() else 0
            parts = list(given_sizes) or [rows // self.size()] * self.size()
            if len(parts) != self.size() or sum(parts) != rows:
                what = f"torch.distributed.all_to_all_single of {rows} rows in parts of {parts}"
                raise InvalidSettings(what, f"give {self.size()} parts, one for each worker, which have all rows")
            sizes += [part * (tensor.numel() // rows if rows else 0) for part in parts]
        self.exchanged += given.numel()

        def store(parts: Sequence[Array]) -> None:
            write_bytes(output, np.concatenate(parts))

        return self._all_to_all(read_bytes(given), sizes, given, [output], store)

    all_to_all_single = alltoall_base

    def _all_to_all(
        self, own: Array, sizes: Sequence[int], like: Any, outs: Sequence[Any], store: Callable[[Sequence[Array]], None]
    ) -> PendingWork:
        """sizes: the number of elements for each worker, and from each. The workers exchange these first, because each
        knows only its own.
        """
        lane, unit, count = self._next_lane(), like.element_size(), self.size()
        call = f"all_to_all of {str(like.dtype).removeprefix('torch.')}"
        known = self._agreed(call, self.rounds.gather(np.array(sizes, "<i8").view(np.uint8)))

        def exchange() -> "Future[Array]":
            table = np.ascontiguousarray(known.result()).view("<i8")
            _check_sizes(table)
            longest = int(table[:, :count].sum(axis=1).max()) * unit
            padded = np.zeros(longest, np.uint8)
            padded[: own.size] = own
            return self.rounds.gather(padded) if longest else finished(np.zeros((count, 0), np.uint8))

        def split() -> None:
            table = np.ascontiguousarray(known.result()).view("<i8")[:, :count] * unit
            ends = table[:, : self.rank() + 1].sum(axis=1)
            rows = zip(gathered.result(), ends - table[:, self.rank()], ends, strict=True)
            store([np.ascontiguousarray(row[first:end]) for row, first, end in rows])

        gathered = lane.run_rounds(known, exchange)
        return self._passes.keep(PendingWork(gathered, outs, split, lane))

    def barrier(self, opts: Any = None) -> PendingWork:
        """Complete once all workers have called this."""
        return self._pending(self.rounds.agree("barrier"), [], lambda: None)

    # Operations.

    def _pending(self, ready: "Future[Any]", tensors: Sequence[Any], store: Callable[[], None]) -> PendingWork:
        return self._passes.keep(PendingWork(ready, tensors, store, self._next_lane()))

    def _done(self, tensors: Sequence[Any]) -> PendingWork:
        return PendingWork(finished(None), tensors, lambda: None, self._next_lane())

    def _joined(self, works: Sequence[PendingWork], tensors: Sequence[Any]) -> PendingWork:
        return works[0] if len(works) == 1 else self._passes.keep(joined(works, tensors, self._next_lane()))

    def _next_lane(self) -> Lane:
        return self._passes.next_lane() if in_pass() else self.rounds.next_lane()

    def _agreed(self, call: str, data: "Future[Any]") -> "Future[Any]":
        """`data`, if all workers have made this call. Otherwise an error in all of them. Calls in a backward pass are
        compared with the pass.
        """
        if in_pass():
            self._passes.note(call)
            return data
        return after([data, self.rounds.agree(call)], data.result)

    def _described(self, tensor: Any) -> str:
        self.exchanged += tensor.numel()
        layout = "" if tensor.layout == torch.strided else "sparse "
        return f"of {layout}{str(tensor.dtype).removeprefix('torch.')} x {tensor.numel()}"


def _bytes(tensor: Any) -> int:
    check_dense(tensor)
    size: int = tensor.numel() * tensor.element_size()
    return size


def _check_sizes(table: Array) -> None:
    """Raise InvalidSettings in all workers if one of them expects a number of elements that differs from what it gets.
    """
    count = len(table)
    wrong = np.argwhere(table[:, :count] != table[:, count:].T)
    if len(wrong):
        giver, receiver = wrong[0]
        what = f"worker {giver} gives worker {receiver} {table[giver, receiver]} elements in all_to_all"
        raise InvalidSettings(f"{what}, which expects {table[receiver, count + giver]}", "let their sizes agree")
