"""The effects of `--reduce` and `--shards`: how a party's workers add their values before these leave the party."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings, TrainingFailed
from geomx_cli.core.futures import after
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass, PartyOperations
from geomx_cli.runtime.frontends.torch.checks import DIGEST, to_first_worker
from geomx_cli.runtime.frontends.torch.model_state import Broadcast, ModelState, PartyBroadcast, Shard
from geomx_cli.runtime.frontends.torch.party_group import PartyGroup
from geomx_cli.runtime.frontends.torch.tensors import local, set_gradient
from geomx_cli.runtime.training.stop_vote import ELECTION, elect

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.contract.settings import Settings
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.backward_pass import Member
    from geomx_cli.runtime.script import Session

__all__ = ["PartyReduction", "Reduction", "ShardReduction", "check_same_round"]

_OLD, _FAILED, _STEPPED = range(3)
"""How new a worker's model is at the end: it did not contribute to the last round, has not taken its step, or has."""
_UNEVEN = "a worker of this party has finished before the others, and they go on without a state of it"
_MOST = 1 << 20
"""A number above a job's number of workers."""


class Reduction:
    """No reduction in the party: every worker is a member of the parameter server and contributes by itself. Base class
    of the others.

    All workers of a party make the same calls in the same order. For the training thread.

    client: the member's; None in workers that are no members.
    passes: the order of backward passes, for all optimizers of the script.
    operations: the same object if the party's workers add gradients by themselves, otherwise None.
    shard: the part of the model that this worker holds; None if it holds all.
    in_party: whether the workers of a party take equal steps.
    weight: the number of workers of which each gradient, when computed, is already the mean.
    local_to: whose gradients are local before they are exchanged.
    rank: among the workers that take equal steps.
    global_rank, num_all_workers, party_ranks: see BaseStore.
    warn: warns the user of conditions that affect the result.
    """

    operations: PartyOperations | None = None
    shard: Shard | None = None
    in_party = False
    weight = 1
    local_to = "worker"
    rank = 0
    client: "Client | None"
    settings: "NodeSettings"
    passes: BackwardPass
    party_ranks: range | None

    def __init__(self, client: "Client", session: "ScriptSession") -> None:
        self.client, self.settings = client, client.settings
        self.warn = partial(session.warn, affects_result=True)
        self.passes = BackwardPass()
        self.global_rank, self.num_all_workers = client.global_rank, client.num_all_workers
        first = client.global_rank - client.rank
        self.party_ranks = None if client.flat else range(first, first + client.num_workers)

    @property
    def member(self) -> "Client":
        """The client, in a worker that is a member."""
        assert self.client is not None
        return self.client

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        return None if self.client is None else self.client.failure

    def cause(self, error: BaseException) -> BaseException | None:
        """The failure in the party that caused this error of the script; None if no failure did."""
        return None

    # Comparisons with other workers.

    def holders(self) -> tuple[int, int]:
        """How many workers of the job have the tensors that this worker has. Also how many of them take each step
        together with
        it: only itself, or a party.
        """
        return self.num_all_workers, 1

    def compare(self, row: "Body") -> None:
        """Send a row of ModelComparison in this worker's name. Does not wait."""
        self.member.control.compare(row)

    def gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """Collect a digest of each worker, once for each name; see BatchCheck."""
        return to_first_worker(self.member, name, digest)

    # The begin.

    def check(self, optimizer: Any, buffers: str, algorithm: str, *, by_gradients: bool) -> None:
        """Raise InvalidSettings for a model or optimizer that cannot be wrapped in such a job."""
        if by_gradients:
            _refuse_closures(optimizer, f"--algo {algorithm}", "an algorithm that exchanges weights, as --algo hfa")

    def broadcasts(self, source: int | None = None) -> tuple[Broadcast, ...]:
        """The functions that copy from the member of this rank, by default the member that provides the initial values:
        one for all tensors, or one for this shard and one for the tensors that are not divided.
        """
        return (Broadcast(self.member, source),)

    def own_keys(self) -> Broadcast:
        """Declares keys of members, in addition to the keys of trained tensors."""
        return Broadcast(self.member)

    def choose_device(self, state: ModelState) -> None:
        """Choose where gradients are added in the party, given a model. Blocks."""

    # Backward passes and steps.

    def share_gradients(self, parameters: Sequence[Any], round_: int, workers: int) -> None:
        """A round has ended in the leader. Give its gradients to the replicas, which do not have them yet.

        workers: the number that contributed to it.
        """

    def step(self, member: "Member") -> Sequence[int]:
        """This worker has taken a step. Return the ranks of the workers that have taken it together."""
        return (0,)

    def total(self, value: int) -> int:
        """The sum over the workers that take equal steps."""
        return value

    def announce(self, changed: Collection[int], count: int, number: int) -> tuple[list[int], int]:
        """Return the numbers of the tensors, of `count`, that have changed in the leader, and the leader's `number`.
        These tensors have to be copied to the workers that hold the same ones.
        """
        return [], number

    def copy(self, tensors: Iterable[Any], source: int = 0) -> None:
        """Copy tensors, or this shard of them, from the worker of this rank to the workers that hold the same ones."""

    def check_round(self, round_: int, workers: int = 0) -> None:
        """Check that all shards of a party belong to this round, and have equally many workers. Raises TrainingFailed.
        """

    # The end.

    def should_stop(self, wishes: Callable[[], bool], agrees: Callable[[bool], bool]) -> bool:
        """See ScriptStore."""
        return agrees(wishes())

    def last_broadcasts(self, prefix: str) -> tuple[Broadcast, ...]:
        """Like `broadcasts`, at the end. If workers may have died by now (`--on-worker-loss leave`), the first worker
        that comes here is the source of copies.
        """
        if self.settings.text("on_worker_loss") != "leave":
            return self.broadcasts()
        own = str(self.global_rank).encode()
        body = {"op": "compare", "keys": [f"{prefix}geomx.last"], "values": [b"", own]}
        return self.broadcasts(int(self.member.control.ask("store", body).result()["values"][0]))

    def prepare_end(self, calls: int) -> None:
        """The script takes no further step, after so many rounds. Blocks while other workers of the party take steps.
        """

    def newest(
        self, state: ModelState, *, is_newest: bool, took_part: bool, has_failed: bool
    ) -> tuple[tuple[Broadcast, ...], bool]:
        """Copies of the newest model, which all workers take at the end. Also returns whether this worker should have
        it already.

        The model is from the worker with the highest global rank among the workers that contributed to the last round.
        If possible, it is from a worker whose backward pass has not failed, and which so has taken the step.

        is_newest: whether the member contributed to the last round.
        took_part: whether this worker took part in its party's last pass.
        """
        elected = self._elect(state, is_newest=is_newest, has_failed=has_failed)
        return self.broadcasts(elected), is_newest and not has_failed

    def _elect(self, state: ModelState, *, is_newest: bool, has_failed: bool) -> int:
        members, key = self.member.num_all_workers, f"{state.prefix}{ELECTION}"
        candidate = self.member.global_rank + (0 if has_failed else members) if is_newest else None
        elected = elect(self.member, key, candidate, 2 * members)
        if elected is None:  # the workers of the last round have died since (--on-worker-loss leave)
            elected = elect(self.member, key, self.member.global_rank, 2 * members)
        assert elected is not None
        return elected % members

    def leave(self) -> None:
        """No operation follows."""


class _GroupReduction(Reduction):
    """For a party whose workers form a group of torch.distributed. Only some of them are members of the parameter
    server.

    The constructor joins the job. It blocks until the party's workers have joined their group, and until the workers
    that exchange with the servers have joined the servers. Raises GeomxError if that fails.

    group: all of the party's workers.
    peers: the workers with the same tensors. Rank 0 of them is the leader, a member.
    """

    in_party = True

    def __init__(self, session: "Session", settings: "Settings") -> None:
        self.group = PartyGroup(settings, session.note_failure, session.end)
        self.client = session.connect_in_group(settings, self.group.activity.last)
        self.group.form(self.client)
        assert session.recovery is not None  # it has joined
        self.group.restarts = session.recovery.join_group(self.group)
        session.await_group = self.group.await_end
        self.peers = self.group
        self.rank = self.group.rank
        self.settings = settings
        self.warn = partial(session.warn, affects_result=True)
        assert settings.global_rank is not None
        self.global_rank, self.num_all_workers = settings.global_rank, settings.num_all_workers
        first = self.global_rank - self.rank
        self.party_ranks: range = range(first, first + self.group.size)

    def compare(self, row: "Body") -> None:
        """See Reduction. The party's first worker sends the rows of all workers, also of workers that are no members.
        """
        if self.group.size > 1:
            self.group.post(row)
        elif self.client is not None:
            self.client.control.compare(row)

    def check(self, optimizer: Any, buffers: str, algorithm: str, *, by_gradients: bool) -> None:
        """See Reduction."""
        _refuse_closures(optimizer, "--reduce torch", "leave --reduce out")

    def total(self, value: int) -> int:
        """See Reduction."""
        return sum(self.group.gather(value))

    def announce(self, changed: Collection[int], count: int, number: int) -> tuple[list[int], int]:
        """See Reduction."""
        # One message in each step names the changed tensors, and only these follow. After most local steps there are
        # none.
        marks = torch.zeros(count + 1, dtype=torch.int64, device="cpu")
        marks[[*changed]] = 1
        marks[-1] = number
        if self.peers.size > 1:
            self.peers.wait(self.peers.send(marks))
        *given, number = marks.tolist()
        return [index for index, mark in enumerate(given) if mark], number

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def copy(self, tensors: Iterable[Any], source: int = 0) -> None:
        """See Reduction."""
        parts = [local(tensor) for tensor in tensors] if self.peers.size > 1 else []
        copies = [part.to(self._device_of(part)).contiguous() for part in parts]
        # All copies begin before the code waits for the first, so that small tensors do not each cost a round trip.
        works = [self.peers.send(copy, source) for copy in copies]
        for part, copy, work in zip(parts, copies, works, strict=True):
            self.peers.wait(work)
            if copy is not part and self.peers.rank != source:
                part.copy_(copy)

    def _device_of(self, part: Any) -> Any:
        """The device on which a tensor is while it is copied."""
        return part.device

    def should_stop(self, wishes: Callable[[], bool], agrees: Callable[[bool], bool]) -> bool:
        """See ScriptStore. The party's first worker decides for all, with each gather of the party."""
        self.group.use_stops(wishes, agrees)
        return self.group.stops

    def prepare_end(self, calls: int) -> None:
        """See Reduction."""
        if self.failure is not None:
            raise self.failure

    def leave(self) -> None:
        """See Reduction."""
        self.group.leave()


class PartyReduction(_GroupReduction):
    """`--reduce torch`: a party's workers add their gradients, and the party's first worker exchanges the sums."""

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session, settings)
        recovery = session.recovery
        assert recovery is not None
        give_up = partial(recovery.give_up, _UNEVEN, tells=self.group.leads)
        self.passes = self.operations = self._operations = PartyOperations(self.group, give_up)

    def holders(self) -> tuple[int, int]:
        """See Reduction."""
        return self.num_all_workers, self.group.size

    def gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """See Reduction. The party's workers call it in the same pass."""
        rows = self.group.gather_bytes(digest)
        if self.client is None:
            return None
        table = np.zeros((self.num_all_workers, DIGEST), np.uint8)
        table[self.party_ranks] = rows
        gathered = to_first_worker(self.client, name, table.reshape(-1))
        if gathered is None:
            return None
        return after([gathered], lambda: gathered.result().sum(axis=0, dtype=np.uint8).reshape(table.shape))

    def broadcasts(self, source: int | None = None, origin: int = 0) -> tuple[Broadcast, ...]:
        """See Reduction. origin: the source's rank in its party."""
        between = None if self.client is None else Broadcast(self.client, source)
        return (PartyBroadcast(self.group, between, origin),)

    def choose_device(self, state: ModelState) -> None:
        """See Reduction."""
        self._operations.choose_device(parameter.device for parameter in state.trained.values())

    def step(self, member: "Member") -> Sequence[int]:
        """See Reduction; blocks."""
        return self._operations.step(member)

    def _device_of(self, part: Any) -> Any:
        return self._operations.device

    def prepare_end(self, calls: int) -> None:
        """See Reduction."""
        super().prepare_end(calls)
        self._operations.follow()

    def newest(
        self, state: ModelState, *, is_newest: bool, took_part: bool, has_failed: bool
    ) -> tuple[tuple[Broadcast, ...], bool]:
        """See Reduction. The source is the best worker in the party whose leader is elected."""
        own = (_FAILED if has_failed else _STEPPED) if took_part else _OLD
        models = self.group.gather(own)
        best = max(models)
        is_newest = bool(self.group.share(int(is_newest)))
        elected = None
        if self.client is not None:
            elected = self._elect(state, is_newest=is_newest and best != _OLD, has_failed=best == _FAILED)
        origin = max(rank for rank, model in enumerate(models) if model == best)
        return self.broadcasts(elected, origin), is_newest and own == _STEPPED


class ShardReduction(_GroupReduction):
    """`--reduce torch --shards`: fully_shard divides the model over the party's workers and reduces its gradients.

    Worker `rank` of a party holds shard `rank % count`, as in a mesh of (replicate, shard). The first worker that holds
    a shard is its leader, which exchanges it with the servers. The default group of torch.distributed has the party's
    workers. Meshes consist of these workers, and fully_shard reduces gradients in this group.
    """

    local_to = "party"

    def __init__(self, session: "Session", settings: "Settings") -> None:
        super().__init__(session, settings)
        self._party = settings.party
        self._index, self._count = self.rank % int(settings.number("shards")), int(settings.number("shards"))
        self.shard = Shard(self._index, self._count, self.group.size)
        self.peers = self.group.part(range(self._index, self.group.size, self._count), f"shard{self._index}")
        self.weight = self.group.size
        self.passes = BackwardPass(self.weight)
        self.group.publish()

    def cause(self, error: BaseException) -> BaseException | None:
        """See Reduction. fully_shard raises failures in the party's group unchanged."""
        return self.group.lost(error) if isinstance(error, RuntimeError) else None

    def holders(self) -> tuple[int, int]:
        """See Reduction."""
        return self.num_all_workers // self._count, self.group.size // self._count

    def gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """See Reduction. A shard's leader speaks for its party, whose gradients fully_shard has reduced."""
        own = np.concatenate([digest, np.array([self.global_rank], np.int32).view(np.uint8)])
        gathered = to_first_worker(self.member, name, own)
        return None if gathered is None else after([gathered], lambda: self._by_global_rank(gathered.result()))

    def _by_global_rank(self, rows: "Array") -> "Array":
        table = np.zeros((self.num_all_workers, DIGEST), np.uint8)
        table[np.ascontiguousarray(rows[:, DIGEST:]).view(np.int32).reshape(-1)] = rows[:, :DIGEST]
        return table

    def check(self, optimizer: Any, buffers: str, algorithm: str, *, by_gradients: bool) -> None:
        """See Reduction."""
        if buffers != "local":
            what = f"buffers={buffers!r} with --shards: the buffers of a party's workers differ"
            raise InvalidSettings(what, 'leave it at "local"')
        super().check(optimizer, buffers, algorithm, by_gradients=by_gradients)

    def broadcasts(self, source: int | None = None) -> tuple[Broadcast, ...]:
        """See Reduction. source: by default the first party's leader of this shard."""
        between = self._between(source) if self.client is not None else None
        whole = PartyBroadcast(self.group, between if self.group.leads else None)
        return PartyBroadcast(self.peers, between), whole

    def own_keys(self) -> Broadcast:
        """See Reduction."""
        return self._between(None)

    def _between(self, source: int | None) -> Broadcast:
        return Broadcast(self.member, self._index if source is None else source, self._index)

    def share_gradients(self, parameters: Sequence[Any], round_: int, workers: int) -> None:
        """See Reduction. Raises TrainingFailed if the party's shards then belong to different rounds."""
        own = [index for index, parameter in enumerate(parameters) if parameter.grad is not None]
        found, workers = self.announce(own if self.client is not None else (), len(parameters), workers)
        for index in found:
            if parameters[index].grad is None:
                set_gradient(parameters[index], torch.empty_like(local(parameters[index])))
        self.copy(parameters[index].grad for index in found)
        self.check_round(round_, workers)

    def step(self, member: "Member") -> Sequence[int]:
        """See Reduction. With fully_shard, all optimizers of a party take the same step, each for its own shard."""
        return range(self.group.size)

    def _device_of(self, part: Any) -> Any:
        if part.is_cuda:
            self.peers.use_gpus()
        return part.device

    def check_round(self, round_: int, workers: int = 0) -> None:
        """See Reduction."""
        check_same_round(self.group, round_, workers)

    def prepare_end(self, calls: int) -> None:
        """See Reduction. Raises InvalidSettings if the party's workers have begun different numbers of rounds."""
        super().prepare_end(calls)
        rounds = self.group.gather(calls)
        if len(set(rounds)) > 1:
            what = f"the workers of party {self._party} have begun {', '.join(map(str, rounds))} rounds"
            raise InvalidSettings(what, "with --shards a party's workers make the same passes and steps")

    def newest(
        self, state: ModelState, *, is_newest: bool, took_part: bool, has_failed: bool
    ) -> tuple[tuple[Broadcast, ...], bool]:
        """See Reduction. The leaders of all shards elect the same party."""
        # One number for both, so that the party gathers once: bit 0 is a failure, bit 1 an older model.
        values = self.group.gather(has_failed + 2 * (not is_newest))
        failed, all_newest = any(value & 1 for value in values), not any(value & 2 for value in values)
        elected = None
        if self.client is not None:
            elected = self._elect(state, is_newest=is_newest, has_failed=failed)
        return self.broadcasts(elected), all_newest and not failed


def check_same_round(group: PartyGroup, round_: int, workers: int) -> None:
    """Raise TrainingFailed unless all workers of the group are in this round, with so many workers. Blocks."""
    values = group.gather(round_ * _MOST + workers, patient=True)
    if len(set(values)) > 1:
        described = [f"round {value // _MOST} of {value % _MOST} workers" for value in values]
        what = f"the workers of a party hold shards of different rounds: {', '.join(described)}"
        raise TrainingFailed(what, "let all workers of a party make the same passes and steps")


def _refuse_closures(optimizer: Any, job: str, instead: str) -> None:
    """Raise InvalidSettings for an optimizer whose step runs a number of backward passes that depends on this worker's
    loss.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        what = f"LBFGS with {job}: how often it computes gradients depends on each worker's own loss"
        raise InvalidSettings(what, f"use another optimizer, or {instead}")
