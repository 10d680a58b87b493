"""The process group of scripts written for torchrun: collectives over the job's servers instead of NCCL or gloo."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch.distributed import DistStoreError, ReduceOp

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.checks import BatchCheck, GradientCheck
from geomx_cli.runtime.frontends.torch.ddp import gradient_sums
from geomx_cli.runtime.frontends.torch.ddp.futures import PendingWork
from geomx_cli.runtime.frontends.torch.ddp.gradient_sums import GradientSums, SparseSum, in_pass
from geomx_cli.runtime.frontends.torch.ddp.group_copies import GroupCopies, untraced
from geomx_cli.runtime.frontends.torch.ddp.group_rounds import GroupRounds, LoneRounds, check_whole, size_class
from geomx_cli.runtime.frontends.torch.ddp.script_watch import RoundTrips
from geomx_cli.runtime.frontends.torch.tensors import EXCHANGED, of_bytes, read_bytes

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["NAME", "GeomxProcessGroup"]

NAME = "geomx"
"""The name that torch.distributed.get_backend returns."""
_PASSES = 3
_ADVICE = "divide the data with torch.utils.data.DistributedSampler, and call its set_epoch in each epoch"


@untraced
class GeomxProcessGroup(GroupCopies):
    """All training workers, by global rank, or one of them by itself.

    Every operation returns at once with a PendingWork. After the job has failed, its `wait` raises the client's error.

    The servers add sums and means of floats, in rank order. `--compress` applies to sums of a backward pass with more
    than 8192 elements, such as DistributedDataParallel's buckets. All other operations are exact: bytes are copied, and
    each worker computes other reductions. Without `adds`, because servers update the sums, each worker computes all
    reductions. At the end of a backward pass, all sums that it began are complete.
    """

    def __init__(
        self, rounds: GroupRounds | LoneRounds, session: "ScriptSession", store: Any, *, encodes: bool,
        adds: bool = True, finite: GradientCheck | None = None,
    ) -> None:  # fmt: skip
        check = BatchCheck(session, _PASSES if rounds.workers > 1 else 0, _ADVICE, self._gather_digest)
        super().__init__(rounds, GradientSums(rounds, check, finite))
        self._name = ""
        self._encodes = encodes
        self._adds = adds
        self._trips = RoundTrips(session, warns=rounds.workers > 1 and not rounds.rank)
        self._values = store
        self._monitored = 0

    def _gather_digest(self, digest: "Array") -> "Future[Array] | None":
        gathered = self.rounds.gather(digest, "batches")
        return None if self.rank() else gathered

    @property
    def passes(self) -> int:
        """The number of backward passes that have begun a sum."""
        return self._passes.passes

    @property
    def calls(self) -> int:
        """The script's calls so far, in a group of all workers. A backward pass counts as one call."""
        return self.rounds.calls if isinstance(self.rounds, GroupRounds) else 0

    def state(self) -> dict[str, Any]:
        """Return the state between the script's calls, for a group of all workers."""
        assert isinstance(self.rounds, GroupRounds)
        kept = {"exchanged": self.exchanged, "passes": self._passes.passes, "monitored": self._monitored}
        return {**kept, "rounds": self.rounds.state()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state`."""
        assert isinstance(self.rounds, GroupRounds)
        self.exchanged, self._monitored = state["exchanged"], state["monitored"]
        self._passes.passes = state["passes"]
        self.rounds.load(state["rounds"])

    def in_next_pass(self, action: Callable[[], None]) -> None:
        """Call `action` in the next backward pass that sums something, before the first sum."""
        self._passes.in_next_pass(action)

    def finish(self) -> None:
        """No backward pass follows."""
        self._passes.finish()

    def getBackendName(self) -> str:  # noqa: N802  # PyTorch's name
        """The name of the backend."""
        return NAME

    # PyTorch keeps the name of a group in its backends, and a group in Python has none.

    @property
    def group_name(self) -> str:
        """The name under which functional collectives, device meshes and torch.compile find this group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(kind) for kind in ("cpu", "cuda") if kind == "cpu" or torch.cuda.is_available()]

    def _get_backend(self, _: Any) -> "GeomxProcessGroup":
        return self

    # Reductions.

    def allreduce(self, tensors: Sequence[Any], opts: Any = None) -> PendingWork:
        """Reduce each tensor in place. Raises InvalidSettings for an unsupported operation."""
        operation = ReduceOp.SUM if opts is None else opts.reduceOp
        return self._joined([self._reduce("all_reduce", tensor, tensor, operation) for tensor in tensors], tensors)

    def allreduce_coalesced(self, tensors: Sequence[Any], opts: Any = None) -> PendingWork:
        """See `allreduce`."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Any], opts: Any) -> PendingWork:
        """Reduce into the tensors of one worker. The other workers' tensors do not change."""
        receives, call = opts.rootRank == self.rank(), f"reduce to {opts.rootRank}"
        # Reduce a copy, so that workers that receive nothing make the same choices as the worker that receives.
        works = [self._reduce(call, tensor.clone(), tensor if receives else None, opts.reduceOp) for tensor in tensors]
        return self._joined(works, tensors)

    def reduce_scatter(self, outputs: Sequence[Any], inputs: Sequence[Sequence[Any]], opts: Any) -> PendingWork:
        """Reduce lists that have a tensor for each worker, which may differ in size. Each worker keeps its own."""
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
        return self._joined(works, outputs)

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any) -> PendingWork:
        """Reduce a tensor that has a part for each worker. Each worker keeps its own part."""
        call, size = "reduce_scatter", output.numel()
        check_whole(call, whole, size * self.size(), "input")
        return self._reduce_part(call, output, whole.detach().clone().reshape(-1), self.rank() * size, opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: Sequence[Any], wholes: Sequence[Any], opts: Any) -> PendingWork:
        """See `reduce_scatter_single`."""
        works = [self.reduce_scatter_single(output, whole, opts) for output, whole in zip(outputs, wholes, strict=True)]
        return self._joined(works, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_part(self, call: str, output: Any, whole: Any, first: int, opts: Any) -> PendingWork:
        """Reduce `whole` (1-D), which changes. Its elements from `first` on become `output`."""
        reduced = self._reduce(call, whole, whole, opts.reduceOp)

        def keep() -> None:
            output.detach().copy_(whole[first : first + output.numel()].view(output.shape))

        return self._passes.keep(PendingWork(reduced.done, [output], keep, self._next_lane()))

    def _reduce(self, call: str, tensor: Any, out: Any | None, operation: Any) -> PendingWork:
        """Reduce `tensor` over all workers, to `out` if given. In all workers, or in none, `out` is `tensor` itself."""
        name = gradient_sums.name_of(operation, tensor.dtype)
        outs, described = [] if out is None else [out], self._described(tensor)
        if not tensor.numel():
            return self._done(outs)
        if tensor.layout == torch.sparse_coo and name in ("SUM", "AVG"):
            return self._sparse_sum(f"{call} {name} {described}", tensor, outs, name)
        adds = self._adds and name in ("SUM", "AVG") and tensor.dtype in EXCHANGED and tensor.layout == torch.strided
        divisor = self.size() if name == "AVG" else 1
        if adds and out is tensor and self._passes.takes(tensor):
            return self._passes.begin_sum(tensor, divisor, f"{call} {name} {described}")
        call = f"{call} {name} {described}"
        if adds and not self._encodes:
            return self._padded_sum(call, tensor, outs, divisor)
        gathered = self._agreed(call, self.rounds.gather(read_bytes(tensor)))

        def store() -> None:
            rows = [of_bytes(np.ascontiguousarray(row), tensor.dtype) for row in gathered.result()]
            result = gradient_sums.combine(name, rows)
            for each in outs:
                each.detach().copy_(result.view(each.shape))

        return self._pending(gathered, outs, store)

    def _padded_sum(self, call: str, tensor: Any, outs: Sequence[Any], divisor: int) -> PendingWork:
        size, kind = tensor.numel(), EXCHANGED[tensor.dtype]
        whole = torch.zeros(size_class(size), dtype=kind, device="cpu")
        whole[:size].copy_(tensor.detach().reshape(-1))
        elements = whole.numpy()
        self._passes.observe(elements)
        summed = self._agreed(call, self.rounds.sum("sum", elements))

        def store() -> None:
            result = whole[:size].div_(divisor) if divisor > 1 else whole[:size]
            for each in outs:
                each.detach().copy_(result.view(each.shape))

        return self._pending(summed, outs, store)

    def _sparse_sum(self, call: str, tensor: Any, outs: Sequence[Any], name: str) -> PendingWork:
        own, lane = SparseSum(tensor), self._next_lane()
        known = self._agreed(call, self.rounds.gather(own.count))
        gathered = lane.run_rounds(known, lambda: self.rounds.gather(own.elements(known.result())))

        def store() -> None:
            result = own.sum(known.result(), gathered.result(), name)
            with torch.no_grad():
                for each in outs:  # itself: a detached sparse tensor has indices of its own
                    each.copy_(result)

        return self._passes.keep(PendingWork(gathered, outs, store, lane))

    # Operations that this group does not have.

    def send(self, *_: Any) -> NoReturn:
        """Between two workers."""
        _refuse("send", "use broadcast or all_gather")

    def recv(self, *_: Any) -> NoReturn:
        """Between two workers."""
        _refuse("recv", "use broadcast or all_gather")

    recv_anysource = recv

    def split_group(self, *_: Any, **__: Any) -> NoReturn:
        """A group of some of the workers."""
        _refuse("split_group", "use the group of all workers")

    merge_remote_group = split_group

    # Barriers.

    def monitored_barrier(self, timeout: timedelta | None = None, *, wait_all_ranks: bool = False) -> None:
        """A barrier over the store; see monitored_barrier in distributed.py."""
        limit = timeout or self._values.timeout
        seconds = limit.total_seconds() if isinstance(limit, timedelta) else float(limit)
        self._monitored += 1
        name = f"monitored/{self._monitored}"
        if self.rank():
            self._values.set(f"{name}/{self.rank()}", "")
            told = self._within(f"{name}/end", seconds)
            late = "worker 0" if told is None else told.decode()
            self._values.delete_key(f"{name}/{self.rank()}")
        else:
            end, missing = time.monotonic() + seconds, []
            for rank in range(1, self.size()):
                if self._within(f"{name}/{rank}", end - time.monotonic()) is None:
                    missing.append(str(rank))
                    if not wait_all_ranks:
                        break
            late = f"worker{'s' * (len(missing) > 1)} {' and '.join(missing)}" if missing else ""
            self._values.set(f"{name}/end", late)
            self._values.delete_key(f"monitored/{self._monitored - 1}/end")  # which all have read
        if late:
            raise RuntimeError(f"{late} did not reach monitored_barrier within {seconds:g} s")

    def _agreed(self, call: str, data: "Future[Any]") -> "Future[Any]":
        if not in_pass():
            self._trips.count()
        return super()._agreed(call, data)

    def _within(self, key: str, seconds: float) -> bytes | None:
        """A value of the store, if it arrives in time."""
        try:
            self._values.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except DistStoreError:
            return None
        found: bytes = self._values.get(key)
        return found


def _refuse(name: str, hint: str) -> NoReturn:
    raise InvalidSettings(f"torch.distributed.{name} is not supported under geomx launch", hint)
