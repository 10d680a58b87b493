"""The effects of `--reduce` and `--shards`: how a party's workers add their values before these leave the party."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.backward_pass import BackwardPass, PartyOperations
from geomx_cli.runtime.frontends.torch.checks import to_first_worker
from geomx_cli.runtime.frontends.torch.model_state import Broadcast, ModelState, Shard
from geomx_cli.runtime.training.stop_vote import ELECTION, elect

if TYPE_CHECKING:
    from concurrent.futures import Future

    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.backward_pass import Member

__all__ = ["Reduction", "refuse_closures"]


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
        together with it: only itself, or a party.
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
            refuse_closures(optimizer, f"--algo {algorithm}", "an algorithm that exchanges weights, as --algo hfa")

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


def refuse_closures(optimizer: Any, job: str, instead: str) -> None:
    """Raise InvalidSettings for an optimizer whose step runs a number of backward passes that depends on this worker's
    loss.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        what = f"LBFGS with {job}: how often it computes gradients depends on each worker's own loss"
        raise InvalidSettings(what, f"use another optimizer, or {instead}")
