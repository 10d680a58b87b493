"""Local steps of a party as of one worker: its leader takes part in the algorithm's rounds (hfa, diloco, esync)."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.broadcast import Broadcast
from geomx_cli.runtime.frontends.torch.local import LocalRounds, SampleCount
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.party.broadcast import PartyBroadcast
from geomx_cli.runtime.frontends.torch.party.passes import PartySynchroniser
from geomx_cli.runtime.frontends.torch.script_model import ScriptModel

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.party.operations import Operations

__all__ = ["LeaderModel", "PartySteps"]


class LeaderModel(ScriptModel):
    """The leader's model, which notes what the algorithm writes to it: its party's other workers get that.

    written: the numbers of parameters, and -1 for the statistics.
    """

    def __init__(self, state: ModelState, statistics: Mapping[str, Any]) -> None:
        super().__init__(state, statistics)
        self.written: set[int] = set()

    def write_weight(self, index: int, value: Floats) -> None:
        """See ModelWeights."""
        self.written.add(index)
        super().write_weight(index, value)

    def write_statistics(self, values: Mapping[str, Floats]) -> None:
        """See ModelWeights."""
        self.written.add(-1)
        super().write_statistics(values)


class PartySteps(PartySynchroniser):
    """Each backward pass leaves the means over the party's workers, whose optimizers take equal steps.

    After a step the leader does what a worker by itself does, and what that changes in its model is copied to the
    party's other workers. Once the leader's own script has finished, it takes over the weights of a worker that
    continues. client, rounds: the leader's, None in other workers.
    """

    def __init__(
        self, operations: "Operations", client: "Client | None", state: ModelState, model: LeaderModel,
        rounds: LocalRounds | None, samples: SampleCount | None, optimizer: Any, statistics: Mapping[str, Any],
        check: BatchCheck,
    ) -> None:  # fmt: skip
        super().__init__(operations, state, optimizer, list(statistics.values()), None, check)
        self._client = client
        self._model = model
        self._local = rounds
        self._samples = samples
        self._parameters = list(state.trained.values())
        self._buffers = list(statistics.values())
        optimizer.register_step_post_hook(self._on_step)

    def receive(self, active: Sequence[int]) -> None:
        """See Member."""
        for bucket in self.sums.buckets:
            self.group.wait(bucket.work)
            self.sums.store(bucket, len(active))

    def _on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        self.after_step(self.operations.step(self))

    def after_step(self, active: Sequence[int]) -> None:
        """See Member."""
        if active[0] != 0:
            self._copy([*self._parameters, *self._buffers], active[0])
        samples = 1 if self._samples is None else self._count(active)
        if self._local is not None:
            self._local.advance(samples)
        self._spread()

    def _count(self, active: Sequence[int]) -> int:
        """The samples of the party's step."""
        assert self._samples is not None
        own = self._samples.take() if self.group.rank in active else 0
        return sum(self.group.gather(own))

    def _spread(self) -> None:
        """Copy what has changed in the leader's model."""
        written = self._model.written
        marks = torch.zeros(len(self._parameters) + 2, dtype=torch.int64, device="cpu")
        marks[[*written]] = 1
        marks[-2] = self.rounds if self._local is None else self._local.count
        self.group.wait(self.group.send(marks))
        written.clear()
        *parameters, self.rounds, statistics = marks.tolist()
        tensors = [tensor for tensor, mark in zip(self._parameters, parameters, strict=True) if mark]
        self._copy([*tensors, *(self._buffers if statistics else [])], 0)

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _copy(self, tensors: Sequence[Any], source: int) -> None:
        """Copy tensors from the worker of this rank to the party's others."""
        device = self.operations.device
        copies = [tensor.detach().to(device, copy=True).contiguous() for tensor in tensors]
        works = [self.group.send(copy, source) for copy in copies]
        for tensor, copy, work in zip(tensors, copies, works, strict=True):
            self.group.wait(work)
            if self.group.rank != source:
                tensor.copy_(copy)

    def finishing(self) -> Iterator["Future[None]"]:
        """See Synchroniser: in the leader, after all of its party's workers have finished."""
        assert self._local is not None
        yield from self._local.finishing()

    def conclude(self) -> None:
        """See Synchroniser: the leader's weights are those of all parties."""
        self.ended = True
        self.rounds = self.group.share(0 if self._local is None else self._local.count)
        self._copy(self._parameters, 0)
        between = None if self._client is None else Broadcast(self._client)
        self.state.conclude(PartyBroadcast(self.group, between), trained=False)
