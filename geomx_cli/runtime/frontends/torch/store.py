"""A PyTorch script's part in the job: the optimizers that it has wrapped, and their end."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.runtime.frontends.torch.checks import BatchCheck
from geomx_cli.runtime.frontends.torch.data import batches_in_epoch
from geomx_cli.runtime.frontends.torch.gradients import GradientSynchroniser
from geomx_cli.runtime.frontends.torch.local_steps import LocalSynchroniser
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.model_watch import Compared, ModelWatch, comparable, compare_request
from geomx_cli.runtime.frontends.torch.reduction import Reduction
from geomx_cli.runtime.frontends.torch.script_model import ScriptModel
from geomx_cli.runtime.frontends.torch.server_steps import ServersOptimizer, ServerSynchroniser
from geomx_cli.runtime.frontends.torch.tensors import BUFFERS
from geomx_cli.runtime.script.base_store import option_of
from geomx_cli.runtime.script.remote_optimizer import MomentumCheck
from geomx_cli.runtime.script.state_advice import StateAdvice
from geomx_cli.runtime.training.stop_vote import ELECTION, STOP
from geomx_cli.runtime.training.train_config import TrainConfig
from geomx_cli.runtime.training.worker_algorithm import State
from geomx_cli.runtime.training.worker_state import WorkerState

if TYPE_CHECKING:
    from geomx_cli.contract.config import NodeSettings
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.frontends import ScriptSession
    from geomx_cli.runtime.frontends.torch.model_state import Broadcast
    from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser

__all__ = ["Store"]

_STEPS = 3
_BEHIND = "this worker has finished before the others, and they go on without a state of it"
_ADVICE = "divide the data with geomx_cli.torch.shard or sampler"


class Store:
    """A script's part in the job; see ScriptStore. For the training thread.

    reduction: how this worker contributes.
    global_rank, num_all_workers, party_ranks: see BaseStore.
    finished: whether no step follows.
    watch: see Watchable.
    save: the function by which a script's `state` saves between two steps; None without a state.
    """

    def __init__(self, session: "ScriptSession", reduction: Reduction) -> None:
        self._session = session
        self._reduction = reduction
        self.global_rank, self.num_all_workers = reduction.global_rank, reduction.num_all_workers
        self.party_ranks = reduction.party_ranks
        self._wrapped: list[Synchroniser] = []
        self._states: list[ModelState] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._on_servers = ServersOptimizer()
        self._accumulating = False  # within no_sync
        self._is_told = False  # whether other workers were told that no step follows
        self._state_advice = StateAdvice("geomx_cli.torch")
        self._parameters: set[int] = set()  # ids of trained parameters, which `_wrapped` keeps alive
        self.finished = False
        self.watch = ModelWatch()
        self.save: Callable[[], None] | None = None

    def option(self, name: str) -> Value:
        """See BaseStore."""
        return option_of(self._reduction.settings, name)

    @property
    def client(self) -> "Client | None":
        """The member's client; None in workers that are no members."""
        return self._reduction.client

    @property
    def recovery(self) -> WorkerState:
        """The state that an earlier life of this worker has saved."""
        assert self._session.recovery is not None  # it has joined
        return self._session.recovery

    @property
    def _algorithm(self) -> plugins.Algorithm:
        return plugins.algorithms()[str(self.option("algo"))]

    @property
    def failure(self) -> BaseException | None:
        """See ScriptStore."""
        return self._reduction.failure

    def cause(self, error: BaseException) -> BaseException | None:
        """See ScriptStore."""
        return self.failure or self._reduction.cause(error)

    @property
    def calls(self) -> int:
        """See ScriptStore. The rounds that the script has begun."""
        return self.rounds

    @property
    def rounds(self) -> int:
        """The number of rounds, of all wrapped optimizers, that this worker has begun."""
        return sum(item.rounds for item in self._wrapped)

    @property
    def steps(self) -> int:
        """See ScriptStore. Rounds, if workers take different numbers of steps in one."""
        by_rounds = self._algorithm.own_pace
        return sum(item.rounds if by_rounds else item.steps for item in self._wrapped)

    def should_stop(self, wishes: Callable[[], bool], agrees: Callable[[bool], bool]) -> bool:
        """See ScriptStore."""
        return self._reduction.should_stop(wishes, agrees)

    @property
    def wraps(self) -> bool:
        """Whether `wrap` got any optimizer."""
        return bool(self._wrapped)

    @property
    def exchanges_gradients(self) -> bool:
        """Whether each step of a wrapped optimizer needs a round. Otherwise most steps are this worker's own."""
        return self._algorithm.exchanges == "gradients"

    @property
    def passes(self) -> int | None:
        """See Watchable. A Synchroniser refuses a step with gradients of this worker only."""
        return None

    def compared(self, optimizer: Any) -> Sequence[Compared]:
        """See Watchable. For an algorithm with local steps, the hyper-parameters, and the tensors of a party that takes
        its steps together. Nothing if parties train separately.
        """
        pairs = zip(self._states, self._wrapped, strict=True)
        found = next((pair for pair in pairs if pair[0].optimizer is optimizer), None)
        if found is None or self.finished or self._algorithm.asynchronous:
            return ()
        (state, own), (everywhere, here) = found, self._reduction.holders()
        tensors = comparable(state.model, state.trained)
        if self.exchanges_gradients:
            return (Compared(self._reduction.compare, state.prefix, everywhere, tensors),)
        scale, epoch = own.scale(), batches_in_epoch()
        settings = Compared(self._reduction.compare, "all/", self.num_all_workers, {}, own.in_step, scale, epoch)
        first = self.party_ranks.start if self.party_ranks else 0
        return (settings, Compared(self._reduction.compare, f"{first}/{state.prefix}", here, tensors))[: 1 + (here > 1)]

    @property
    def wrapped(self) -> "Sequence[Synchroniser]":
        """The objects that `wrap` has attached to each optimizer, in the order of the calls."""
        return self._wrapped

    @property
    def trained(self) -> list[Any]:
        """The parameters that all wrapped optimizers train."""
        return [tensor for state in self._states for tensor in state.trained.values()]

    @property
    def collectives(self) -> int:
        """The script's calls of collective operations so far."""
        return 0

    def kept(self) -> State:
        """The state that this part in the job keeps between steps, except the wrapped optimizers."""
        return State({"watch": self.watch.state([state.optimizer for state in self._states])})

    def go_on(self, state: State) -> None:
        """Continue from the state that an earlier life has `kept`, with the same optimizers wrapped."""
        self.watch.load(state.values["watch"], [state.optimizer for state in self._states])

    def check_complete(self, objects: Sequence[Any]) -> None:
        """Raise InvalidSettings unless `objects` has each wrapped optimizer, and each wrapped model or one that
        contains it.
        """
        optimizers = {id(_innermost(each)) for each in objects}
        held = {id(tensor) for each in objects if hasattr(each, "parameters") for tensor in each.parameters()}
        for state in self._states:
            if missing := [name for name, tensor in state.trained.items() if id(tensor) not in held]:
                what = f"geomx.state has no object with the parameter {missing[0]} of a wrapped model"
                raise InvalidSettings(what, "add the model, as in geomx.state(model=model, optimizer=optimizer)")
            if id(state.optimizer) not in optimizers:
                what = f"geomx.state has no {type(state.optimizer).__name__} that was wrapped"
                raise InvalidSettings(what, "add the optimizer, as in geomx.state(model=model, optimizer=optimizer)")

    def is_wrapped(self, optimizer: Any) -> bool:
        """Whether `wrap` got this optimizer."""
        return optimizer in self._optimizers

    def is_foreign(self, optimizer: Any) -> bool:
        """Whether an optimizer is not wrapped, but updates parameters of a wrapped one."""
        updated = (item for group in optimizer.param_groups for item in group["params"])
        return not self.is_wrapped(optimizer) and any(id(item) in self._parameters for item in updated)

    def updates_common(self, optimizer: Any) -> bool:
        """Whether an optimizer updates parameters that the workers train together."""
        return self.is_wrapped(optimizer) or self.is_foreign(optimizer)

    def tell_alone(self, exchanges: int) -> None:
        """Report to the servers that this worker takes step after step since so many exchanges, and exchanges nothing.
        """
        self._reduction.compare(compare_request("alone", "alone", exchanges, self.num_all_workers, {}))

    def wrap(self, model: Any, optimizer: Any, buffers: str) -> None:
        """See geomx_cli.torch.wrap."""
        given = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
        if len(given) + len(self._wrapped) > 1 and self._algorithm.own_pace:
            algorithm = self._algorithm.name
            what = f"several optimizers with --algo {algorithm}: workers take different numbers of steps in a round"
            raise InvalidSettings(what, "wrap one optimizer of all parameters, or launch with --algo hfa or diloco")
        for each in given:
            self._wrap(model, _innermost(each), buffers)

    def wrap_for_loop(self, model: Any, optimizer: Any, buffers: str) -> None:
        """Like `wrap`, in a script that has the training loop itself, and so may save through `state`."""
        self.wrap(model, optimizer, buffers)
        self._state_advice.add("model", model)
        for each in optimizer if isinstance(optimizer, list | tuple) else (optimizer,):
            self._state_advice.add("optimizer", each)
        self.recovery.advice = self._state_advice.text

    def _wrap(self, model: Any, optimizer: Any, buffers: str) -> None:
        if self.finished:
            raise InvalidSettings("this worker has finished", "wrap all optimizers before geomx.finish")
        if not hasattr(model, "named_parameters") or not hasattr(optimizer, "param_groups"):
            given = f"wrap takes a model and its optimizer, not {type(model).__name__} and {type(optimizer).__name__}"
            raise InvalidSettings(given, "write geomx.wrap(model, optimizer)")
        if optimizer in self._optimizers:
            raise InvalidSettings("this optimizer is wrapped already", "wrap each optimizer once")
        prefix = f"{len(self._wrapped) + 1}/" if self._wrapped else ""
        state = ModelState(model, optimizer, prefix, self._reduction.shard)
        for name, parameter in state.trained.items():
            if id(parameter) in self._parameters:
                what = f"parameter {name} is in two wrapped optimizers"
                raise InvalidSettings(what, "give one of them all parameters that both train, or wrap one")
        self._wrapped.append(self._synchronise(state, model, optimizer, buffers))
        self._wrapped[-1].accumulating = self._accumulating
        self._states.append(state)
        self._optimizers.add(optimizer)
        self._parameters |= {id(parameter) for parameter in state.trained.values()}

    def _batch_check(self) -> BatchCheck:
        """For the first optimizer. The values that others compute come from the same batches."""
        rounds = 0 if self._wrapped or self.num_all_workers == 1 else _STEPS
        if self._algorithm.asynchronous:
            rounds = min(rounds, 1)  # then the parties' weights differ
        if self._reduction.client is None and self._reduction.shard is not None:
            rounds = 0  # the leader of the shard speaks for the party
        gather = partial(self._reduction.gather, "geomx.batches")
        return BatchCheck(self._session, rounds, _ADVICE, gather)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """See geomx_cli.torch.no_sync."""
        before = self._accumulating
        self._accumulate(True)
        try:
            yield
        finally:
            self._accumulate(before)

    def _accumulate(self, accumulating: bool) -> None:
        self._accumulating = accumulating
        for item in self._wrapped:
            item.accumulating = accumulating

    def finish(self) -> None:
        """See geomx_cli.torch.finish."""
        self._is_told = True
        self.wait_for_operations()

    def wait_for_operations(self) -> None:
        """See ScriptStore. Called at the end of a script that has not called `finish`."""
        if self.finished:
            return
        self.finished = True
        differ = self.num_all_workers > 1 and not self.exchanges_gradients
        if self._wrapped and differ and not self._is_told:
            self._session.warn(
                "the script has ended without geomx.finish(): each worker's model had steps of its own until now; call"
                " it after the last step, before the model is evaluated or saved"
            )
        self._reduction.prepare_end(self.calls)
        _finish_rounds(self._wrapped, self._save_others_round)
        for item in self._wrapped:
            item.share_model()
        if replaced := next((item.replaced for item in self._wrapped if item.replaced), ""):
            self._session.warn(
                f"{replaced} was not the same here as in the worker whose model all have now, after the same gradients:"
                " did a schedule, a loaded checkpoint or a change of weights differ between workers?",
                affects_result=True,
            )
        for added in filter(None, (state.added() for state in self._states)):
            message = f"parameter {added} is not in all workers the same: the model got it after wrap"
            self._session.warn(message, affects_result=True)
        self._reduction.leave()

    def _save_others_round(self) -> None:
        """The others continue to train, and this worker takes part without contributing. A next life may be one round
        behind.
        """
        if self.save is not None and self.recovery.saves_alone and len(self._wrapped) == 1:
            self.save()
        else:  # with several optimizers, one is always in the middle of a round
            self.recovery.give_up(_BEHIND)

    def _synchronise(self, state: ModelState, model: Any, optimizer: Any, buffers: str) -> "Synchroniser":
        """Set the servers up, give all workers the initial tensors, and register the hooks. Blocks until all workers
        have called this.
        """
        reduction, about = self._reduction, self._algorithm
        by_gradients = about.exchanges == "gradients"
        reduction.check(optimizer, buffers, about.name, by_gradients=by_gradients and not about.asynchronous)
        chosen = _Chosen.of(reduction.settings, state, buffers)
        recovery = self.recovery
        client, check = reduction.client, self._batch_check()
        if client is not None:
            if about.asynchronous:
                self._on_servers.set(client, optimizer, recovery)
            chosen.set_servers_up(client, optimizer, recovery)
        state.copy_initial(*reduction.broadcasts())
        if client is not None:
            chosen.declare(reduction.own_keys(), state)
            client.control.barrier("all")
        reduction.choose_device(state)
        statistics = list(chosen.statistics.values())
        if about.asynchronous:
            return ServerSynchroniser(reduction, state, optimizer, check)
        if by_gradients:
            return GradientSynchroniser(reduction, state, optimizer, statistics, check)
        weights = ScriptModel(state, chosen.statistics)
        part = partial(chosen.worker_part, weights)
        return LocalSynchroniser(reduction, state, weights, part, model, optimizer, statistics, check, recovery)


def _innermost(optimizer: Any) -> Any:
    """The optimizer that takes the steps. It is within Accelerate's or Lightning's optimizer, which decides when."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def _finish_rounds(wrapped: "Sequence[Synchroniser]", save: Callable[[], None]) -> None:
    """Run `finishing` of all synchronisers concurrently, because their rounds end in any order."""
    waiting: dict[Future[None], Iterator[Future[None] | None]] = {}
    ready = [item.finishing() for item in wrapped]
    while ready or waiting:
        for each in ready:
            for future in each:
                if future is not None:
                    waiting[future] = each
                    break
                save()
        ready = [waiting.pop(future) for future in wait(waiting, return_when=FIRST_COMPLETED).done]


@dataclass(frozen=True)
class _Chosen:
    """The job's algorithm, for one wrapped optimizer. statistics: the buffers to average, by key."""

    config: TrainConfig
    about: plugins.Algorithm
    algorithm: Any
    statistics: dict[str, Any]

    @classmethod
    def of(cls, settings: "NodeSettings", state: ModelState, buffers: str) -> "_Chosen":
        """Raises InvalidSettings for `buffers` that the algorithm cannot average."""
        config = TrainConfig.from_options(settings.options)
        about = plugins.algorithms()[config.algorithm]
        algorithm: Any = plugins.find("algorithm", config.algorithm)
        by_gradients = about.exchanges == "gradients"
        averages = not about.asynchronous if by_gradients else algorithm.server_optimizer(config) is None
        statistics = _statistics(state, buffers, about.name, averages=averages)
        if not by_gradients:
            config = replace(config, options={**config.options, "sync_stats": bool(statistics)})
        return cls(config, about, algorithm, statistics)

    @property
    def _by_gradients(self) -> bool:
        return self.about.exchanges == "gradients"

    def worker_part(self, model: ScriptModel, client: "Client") -> Any:
        """The worker part of an algorithm that exchanges weights."""
        return self.algorithm.worker(client, model, self.config)

    def set_servers_up(self, client: "Client", optimizer: Any, recovery: WorkerState) -> None:
        """Give the servers the algorithm's own optimizer, and check the script's."""
        if self._by_gradients:
            momentum = max(float(group.get("momentum", 0.0)) for group in optimizer.param_groups)
            MomentumCheck(client).use_optimizer(momentum, on_servers=self.about.asynchronous)
            return
        outer = self.algorithm.server_optimizer(self.config)
        if outer is not None and client.global_rank == 0 and not recovery.is_set_up:
            client.control.set_optimizer(*outer)
            recovery.set_up()

    def declare(self, broadcast: "Broadcast", state: ModelState) -> None:
        """Declare the keys in addition to the keys of trained tensors."""
        broadcast.arrays({f"{state.prefix}{name}": np.zeros(1, np.float32) for name in (STOP, ELECTION)})
        if self.statistics and self._by_gradients:
            size = sum(tensor.numel() for tensor in self.statistics.values())
            broadcast.arrays({f"{state.prefix}{BUFFERS}": np.zeros(size, np.float32)})
        else:  # if no worker ever contributes, these values remain the job's
            broadcast.arrays(ScriptModel(state, self.statistics).read_statistics())


def _statistics(state: ModelState, buffers: str, algorithm: str, *, averages: bool) -> dict[str, Any]:
    """The buffers to average, by key. averages: whether the servers average, and run no optimizer on the values."""
    if buffers == "local":
        return {}
    if buffers != "mean":
        raise InvalidSettings(f"there is no buffers={buffers!r}", 'write "local" or "mean"')
    if not averages:
        what = f'buffers="mean" with --algo {algorithm}, whose servers do not average'
        raise InvalidSettings(what, 'leave it at "local", or train with fsa, sync or hfa')
    return {f"{state.prefix}{name}": tensor for name, tensor in state.buffers.items() if tensor.is_floating_point()}
