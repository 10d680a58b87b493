"""Local steps: the script's optimizer trains this worker's weights, and algorithms exchange them (hfa, diloco, esync).
"""

import functools
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.buckets import Buckets
from geomx_cli.runtime.frontends.torch.checks import BatchCheck, HeldWeights, is_finite, not_finite
from geomx_cli.runtime.frontends.torch.data import follow_loaders
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.script_model import ScriptModel, last_gradients
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser
from geomx_cli.runtime.frontends.torch.tensors import local
from geomx_cli.runtime.training.stop_vote import STOP, StopVote
from geomx_cli.runtime.training.worker_algorithm import (
    DrainableWorkerAlgorithm,
    PacedWorkerAlgorithm,
    State,
    Stopwatch,
)
from geomx_cli.runtime.training.worker_state import WorkerState

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends.torch.reduction import Reduction
    from geomx_cli.runtime.training.worker_algorithm import WorkerAlgorithm

__all__ = ["LocalSynchroniser"]

_ASKING = 0.02
"""Seconds between the checks of a waiting worker whether others wait for it."""


class LocalRounds:
    """Drives an algorithm's worker part as the bundled loop does. For the training thread. All methods raise the job's
    failures.

    count: number of rounds begun.
    ended: True after `finishing`.
    recovery: this worker's saved state. If the worker continues, `load` follows.
    """

    def __init__(
        self, client: "Client", state: ModelState, part: "WorkerAlgorithm", warn: Callable[[str], None],
        recovery: WorkerState,
    ) -> None:  # fmt: skip
        if not isinstance(part, DrainableWorkerAlgorithm):
            what = f"the algorithm {client.settings.text('algo')} cannot train in a script"
            raise InvalidSettings(what, "its worker part has to derive from DrainableWorkerAlgorithm")
        self.count = 0
        self.ended = False
        self._client = client
        self._part = part
        self._held = HeldWeights(state.optimizer, state.trained, client.settings.text("algo"))
        self._vote = StopVote(client, -len(state.trained), f"{state.prefix}{STOP}")
        self._watch = Stopwatch()
        self._exchanging = False
        self._finite = _FiniteCheck(warn, state)
        if isinstance(part, PacedWorkerAlgorithm):
            part.before_round, part.contributed = recovery.contribute, recovery.contributed
        if not recovery.continues:
            self._part.start()

    @property
    def exchanging(self) -> bool:
        """See Synchroniser."""
        return self._exchanging

    def state(self) -> State:
        """See Synchroniser."""
        state = State({"count": self.count})
        state.add("algorithm", self._part.state())
        return state

    def load(self, state: State) -> None:
        """See Synchroniser. Called in place of the part's `start`."""
        self.count = state.values["count"]
        self._part.load(state.part("algorithm"))
        if isinstance(self._part, PacedWorkerAlgorithm):
            self._part.continue_round()

    def advance(self, samples: int) -> None:
        """The optimizer has taken a step, with so many samples. If a round is due, it ends here."""
        self._held.check()
        if self._part.after_step(samples, self._watch):
            self._begin_round(steps_left=sys.maxsize)
        if self._exchanging and self._part.must_wait:
            self._synchronise()
        self._watch.take()

    def before_step(self) -> None:
        """The optimizer is about to take a step, or a GradScaler has skipped it."""
        if isinstance(self._part, PacedWorkerAlgorithm):
            self._part.resume()

    def while_waiting(self, other: "Future[Any]") -> None:
        """The script waits until `other` is done, and other workers may have to take steps for that. Until then, take
        part in the rounds in which they wait for this worker. The model changes only with the next step.
        """
        part, began = self._part, time.monotonic()
        if not isinstance(part, PacedWorkerAlgorithm):
            return
        self._client.waits(True)
        try:
            while part.must_join:  # `other` may be done at once, although an earlier life had to wait
                self._join(part)
            while not wait((other,), _ASKING).done:
                asked = part.awaited()
                wait((other, asked), return_when=FIRST_COMPLETED)
                if asked.done() and asked.result():
                    self._join(part)
        finally:
            self._client.waits(False)
        part.waited(time.monotonic() - began)

    def _join(self, part: PacedWorkerAlgorithm) -> None:
        part.join()
        self._begin_round(steps_left=sys.maxsize)
        self._synchronise()

    def _begin_round(self, steps_left: int) -> None:
        self.count += 1
        self._exchanging = True
        self._finite.before(self.count)
        self._vote.begin(stop=False, unfinished=self._part.unfinished(steps_left))

    def _synchronise(self) -> bool:
        """Take the round's result. Return True if no worker has anything to contribute to later rounds."""
        self._part.synchronise()
        self._finite.after()
        unfinished = self._vote.result().unfinished
        self._exchanging = False
        self._part.expect(unfinished)
        return self._part.is_global_round and not unfinished

    def finishing(self) -> Iterator["Future[None] | None"]:
        """See Synchroniser."""
        while not self.ended:
            if not self._exchanging:
                self._part.drain()
                self._begin_round(steps_left=0)
            yield self._vote.pending
            self.ended = self._synchronise()
            if not self.ended:
                yield None
        self._part.end()


class _FiniteCheck:
    """Warns once, in the worker that brings nan or infinity to the weights. The means spread these to all workers."""

    def __init__(self, warn: Callable[[str], None], state: ModelState) -> None:
        self._warn = warn
        self._state = state
        self._looks = True

    def before(self, round_: int) -> None:
        """This worker contributes its weights."""
        if self._looks and (name := self._spoiled()):
            self._looks = False
            where = f"{name} has elements that are not finite here in round {round_}"
            self._warn(not_finite(where, "the means over the workers"))

    def after(self) -> None:
        """This worker has received the means."""
        self._looks = self._looks and not self._spoiled()

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def _spoiled(self) -> str:
        return next((name for name, tensor in self._state.trained.items() if not is_finite(local(tensor))), "")


class SampleCount:
    """Module hook that counts the samples of training passes; scripts copy and pickle it with their module."""

    def __init__(self, model: Any) -> None:
        self._samples = 0
        self._counted = False
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, model: Any, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        """Count the rows of the first tensor."""
        tensors = (item for item in (*inputs, *named.values()) if isinstance(item, torch.Tensor) and item.ndim)
        if torch.is_grad_enabled() and (first := next(tensors, None)) is not None:
            self._samples += len(first)
            self._counted = True

    @property
    def pending(self) -> tuple[int, bool]:
        """The number of samples since the last `pop`, and whether any were counted yet."""
        return self._samples, self._counted

    @pending.setter
    def pending(self, pending: tuple[int, bool]) -> None:
        self._samples, self._counted = pending

    def pop(self) -> int:
        """The number of samples since the last call, at least 1. Raises InvalidSettings if none were counted yet."""
        if not self._counted:
            what = "--weight samples: the wrapped model was called with no tensor before the optimizer's step"
            raise InvalidSettings(what, "call that model with its batch, in tensors, or leave --weight out")
        samples, self._samples = max(1, self._samples), 0
        return samples


_SYNCHRONISERS: "weakref.WeakKeyDictionary[Any, LocalSynchroniser]" = weakref.WeakKeyDictionary()
"""The GradScalers of this process, by their optimizers."""


@functools.cache
def _watch_scalers() -> None:
    """Make GradScalers report the steps that they skip, because optimizers do not learn of these."""
    original = torch.amp.GradScaler.step

    @functools.wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **options: Any) -> Any:
        own = _SYNCHRONISERS.get(optimizer)
        before = own.taken if own is not None else 0
        if own is not None:
            own.scaler = scaler
        result = original(scaler, optimizer, *args, **options)
        if own is not None and own.taken == before:
            own.skip()
        return result

    torch.amp.GradScaler.step = step


class LocalSynchroniser(Synchroniser):
    """Takes part in an algorithm's rounds after each step of the optimizer.

    A round that is due ends within that step. The job's failures are raised from `optimizer.step`.

    With `--reduce torch`, the gradients after a backward pass are the means over the party's workers, whose optimizers
    take equal steps. With shards, fully_shard computes these means. After a step the leader takes part in rounds like a
    single worker, and the changed weights are copied to the others. When the leader's own script has finished, it
    copies the weights of a worker that continues.

    taken: steps so far, including steps that a GradScaler has skipped.
    scaler: that GradScaler; None before the first step with one.
    """

    kept = (*Synchroniser.kept, "taken", "in_step")
    taken = 0
    scaler: Any = None

    def __init__(
        self, reduction: "Reduction", state: ModelState, model: ScriptModel, algorithm: Callable[["Client"], Any],
        module: Any, optimizer: Any, statistics: Sequence[Any], check: BatchCheck, recovery: WorkerState,
    ) -> None:  # fmt: skip
        """algorithm: makes the worker part for the model. Only members have a worker part."""
        operations = reduction.operations
        carrier = Buckets(operations, state, statistics, check) if operations is not None else None
        # Its hook precedes HeldWeights's hook, because it may write weights.
        super().__init__(reduction, state, optimizer, check, carrier)
        self._model = model
        self._tensors = [[parameter] for parameter in state.trained.values()] + [list(statistics)]
        self._local: LocalRounds | None = None
        self._leader_exchanges = False
        if (client := reduction.client) is not None:
            self._local = LocalRounds(client, state, algorithm(client), reduction.warn, recovery)
        self._samples = SampleCount(module) if reduction.settings.text("weight") == "samples" else None
        optimizer.register_step_post_hook(self._after_step)
        if not reduction.in_party:  # otherwise the whole party skips a skipped step
            self.in_step = True
            _watch_scalers()
            follow_loaders(torch.utils.data.dataloader._BaseDataLoaderIter)
            _SYNCHRONISERS[optimizer] = self

    @property
    def exchanging(self) -> bool:
        """See Synchroniser."""
        return self._leader_exchanges if self._local is None else self._local.exchanging

    def state(self) -> State:
        """See Synchroniser."""
        state = super().state()
        if self._local is not None:
            state.add("local", self._local.state())
        if self._samples is not None:
            state.values["samples"] = self._samples.pending
        return state

    def load(self, state: State) -> None:
        """See Synchroniser."""
        super().load(state)
        if self._local is not None:
            self._local.load(state.part("local"))
        if self._samples is not None:
            self._samples.pending = tuple(state.values["samples"])
        self._model.written.clear()

    @property
    def steps(self) -> int:
        """See Synchroniser."""
        return self.taken

    def skip(self) -> None:
        """A GradScaler has skipped the step, because gradients of this worker are not finite. Other workers may have
        taken it. Rounds and collectives follow from the number of steps, so this step counts too.
        """
        self.in_step = False
        self._resume()
        self._count_step()

    def _resume(self) -> None:
        if self._local is not None:
            self._local.before_step()

    def scale(self) -> float | None:
        """See Synchroniser. Not the present scale, which a worker alone lowers for any optimizer of that GradScaler."""
        return float(self.scaler._init_scale) if self.scaler is not None and self.scaler.is_enabled() else None

    def while_waiting(self, other: "Future[Any]") -> None:
        """See Synchroniser."""
        assert self._local is not None
        self._local.while_waiting(other)
        self.rounds = self._local.count

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Optimizer hook; returns the arguments of the step."""
        super()._before_step(optimizer, args, kwargs)
        self._resume()
        if self._carrier is None and self._check.compares:
            self._check.observe(*last_gradients(self._state))
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def resumed() -> Any:
            """The closure may wait for other workers, and so take part in rounds. Their result precedes the step."""
            loss = closure()
            self._resume()
            return loss

        return ((args[0], resumed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": resumed})

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Optimizer hook."""
        self._count_step()

    def _count_step(self) -> None:
        self.taken += 1
        self.after_step(self._reduction.step(self))

    def after_step(self, active: Sequence[int]) -> None:
        """See Member."""
        if active[0]:
            self._reduction.copy((tensor for part in self._tensors for tensor in part), active[0])
        samples = 1
        if self._samples is not None:
            samples = self._reduction.total(self._samples.pop() if self._reduction.rank in active else 0)
        if self._local is not None:
            self._local.advance(samples)
        self._spread()

    def _spread(self) -> None:
        """Copy the changes in the leader's model to the workers that hold the same tensors."""
        number = 2 * self.rounds if self._local is None else 2 * self._local.count + self._local.exchanging
        changed, number = self._reduction.announce(self._model.written, len(self._tensors), number)
        self.rounds, self._leader_exchanges = number // 2, bool(number % 2)  # all workers save at the same places
        self._model.written.clear()
        self._reduction.copy(tensor for index in changed for tensor in self._tensors[index])
        self._reduction.check_round(self.rounds)

    def finishing(self) -> Iterator["Future[None] | None"]:
        """See Synchroniser."""
        self.leave()
        if self._local is not None:
            yield from self._local.finishing()
        self.ended = True

    def share_model(self) -> None:
        """See Synchroniser. The members' weights are equal already."""
        self.ended = True
        self._spread()
        self._state.copy_final(*self._reduction.last_broadcasts(self._state.prefix), trained=False)
