"""The optimizers that a PyTorch script has wrapped, and their end."""

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value
from geomx_cli.runtime.frontends.torch.batch_check import BatchCheck
from geomx_cli.runtime.frontends.torch.made_calls import batches_in_epoch
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.model_watch import Compared, comparable, row_of
from geomx_cli.runtime.frontends.torch.synchroniser import Synchroniser

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.cluster.bodies import Body
    from geomx_cli.runtime.frontends import ScriptSession

__all__ = ["WrappingStore", "finish_rounds", "innermost"]

_STEPS = 3
_ADVICE = "divide the data with geomx_cli.torch.shard or sampler"


class WrappingStore(ABC):
    """Base class of ScriptStores behind geomx_cli.torch. For the training thread. finished: no step follows."""

    def __init__(self, session: "ScriptSession") -> None:
        self._session = session
        self._wrapped: list[Synchroniser] = []
        self._states: list[ModelState] = []
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._accumulating = False  # within no_sync
        self._is_told = False  # that no step follows
        self._parameters: set[int] = set()  # ids of those that are trained, which `_wrapped` keeps alive
        self.finished = False

    @property
    @abstractmethod
    def global_rank(self) -> int:
        """See BaseStore."""

    @property
    @abstractmethod
    def num_all_workers(self) -> int:
        """See BaseStore."""

    @property
    @abstractmethod
    def party_ranks(self) -> range | None:
        """See BaseStore."""

    @abstractmethod
    def option(self, name: str) -> Value:
        """See BaseStore."""

    @property
    @abstractmethod
    def failure(self) -> BaseException | None:
        """See ScriptStore."""

    def cause(self, error: BaseException) -> BaseException | None:
        """See ScriptStore."""
        return self.failure

    @property
    def calls(self) -> int:
        """See ScriptStore; the rounds that the script has begun."""
        return sum(item.rounds for item in self._wrapped)

    @property
    def wraps(self) -> bool:
        """Whether `wrap` got any optimizer."""
        return bool(self._wrapped)

    @property
    def exchanges_gradients(self) -> bool:
        """Whether each step of a wrapped optimizer needs a round; else most are this worker's own."""
        return plugins.algorithms()[str(self.option("algo"))].exchanges == "gradients"

    @property
    def passes(self) -> int | None:
        """See Watchable: `Synchroniser.check_step` refuses a step with gradients of this worker only."""
        return None

    def compared(self, optimizer: Any) -> Sequence[Compared]:
        """See Watchable: of an algorithm with local steps the hyper-parameters, and the tensors of a party that takes
        its steps together; nothing where parties train separately.
        """
        about = plugins.algorithms()[str(self.option("algo"))]
        pairs = zip(self._states, self._wrapped, strict=True)
        found = next((pair for pair in pairs if pair[0].optimizer is optimizer), None)
        if found is None or self.finished or about.asynchronous:
            return ()
        (state, own), (everywhere, here) = found, self._holders()
        tensors = comparable(state.model, state.trained)
        if self.exchanges_gradients:
            return (Compared(self._compare, state.prefix, everywhere, tensors),)
        scale, epoch = own.scale(), batches_in_epoch()
        settings = Compared(self._compare, "all/", self.num_all_workers, {}, own.in_step, scale, epoch)
        first = self.party_ranks.start if self.party_ranks else 0
        return (settings, Compared(self._compare, f"{first}/{state.prefix}", here, tensors))[: 1 + (here > 1)]

    @abstractmethod
    def _compare(self, row: "Body") -> None:
        """Send a row of ModelComparison in this worker's name; waits for nothing."""

    @abstractmethod
    def _holders(self) -> tuple[int, int]:
        """How many workers of the job have the tensors that this one has, and how many of those that take each step
        together with it: itself, or a party.
        """

    def is_wrapped(self, optimizer: Any) -> bool:
        """Whether `wrap` got this optimizer."""
        return optimizer in self._optimizers

    def is_foreign(self, optimizer: Any) -> bool:
        """Whether an optimizer is not wrapped, and updates parameters of one that is."""
        updated = (item for group in optimizer.param_groups for item in group["params"])
        return not self.is_wrapped(optimizer) and any(id(item) in self._parameters for item in updated)

    def updates_common(self, optimizer: Any) -> bool:
        """Whether an optimizer updates parameters that the workers train together."""
        return self.is_wrapped(optimizer) or self.is_foreign(optimizer)

    def tell_alone(self, exchanges: int) -> None:
        """Tell the servers that this worker takes step after step since that many exchanges, and exchanges nothing."""
        self._compare(row_of("alone", "alone", exchanges, self.num_all_workers, {}))

    def wrap(self, model: Any, optimizer: Any, buffers: str) -> None:
        """See geomx_cli.torch.wrap."""
        given = optimizer if isinstance(optimizer, list | tuple) else (optimizer,)
        if len(given) + len(self._wrapped) > 1 and plugins.algorithms()[algorithm := str(self.option("algo"))].own_pace:
            what = f"several optimizers with --algo {algorithm}: workers take different numbers of steps in a round"
            raise InvalidSettings(what, "wrap one optimizer of all parameters, or launch with --algo hfa or diloco")
        for each in given:
            self._wrap(model, innermost(each), buffers)

    def _wrap(self, model: Any, optimizer: Any, buffers: str) -> None:
        if self.finished:
            raise InvalidSettings("this worker has finished", "wrap all optimizers before geomx.finish")
        if not hasattr(model, "named_parameters") or not hasattr(optimizer, "param_groups"):
            given = f"wrap takes a model and its optimizer, not {type(model).__name__} and {type(optimizer).__name__}"
            raise InvalidSettings(given, "write geomx.wrap(model, optimizer)")
        if optimizer in self._optimizers:
            raise InvalidSettings("this optimizer is wrapped already", "wrap each optimizer once")
        prefix = f"{len(self._wrapped) + 1}/" if self._wrapped else ""
        state = self._state(model, optimizer, prefix)
        for name, parameter in state.trained.items():
            if id(parameter) in self._parameters:
                what = f"parameter {name} is in two wrapped optimizers"
                raise InvalidSettings(what, "give one of them all parameters that both train, or wrap one")
        self._wrapped.append(self._synchronise(state, model, optimizer, buffers, self._batch_check()))
        self._wrapped[-1].accumulating = self._accumulating
        self._states.append(state)
        self._optimizers.add(optimizer)
        self._parameters |= {id(parameter) for parameter in state.trained.values()}

    def _batch_check(self) -> BatchCheck:
        """For the first optimizer: what is computed with the others comes from the same batches."""
        rounds = 0 if self._wrapped or self.num_all_workers == 1 else _STEPS
        if plugins.algorithms()[str(self.option("algo"))].asynchronous:
            rounds = min(rounds, 1)  # then the parties' weights differ
        return BatchCheck(self._session, rounds, _ADVICE, lambda digest: self._gather("geomx.batches", digest))

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
        self.settle()

    def settle(self) -> None:
        """See ScriptStore: at the end of a script that has not called `finish`."""
        if self.finished:
            return
        self.finished = True
        differ = self.num_all_workers > 1 and not self.exchanges_gradients
        if self._wrapped and differ and not self._is_told:
            self._session.warn(
                "the script has ended without geomx.finish(): each worker's model had steps of its own until now; call"
                " it after the last step, before the model is evaluated or saved"
            )
        self._finish(self._wrapped)
        for item in self._wrapped:
            item.conclude()
        if replaced := next((item.replaced for item in self._wrapped if item.replaced), ""):
            self._session.warn(
                f"{replaced} was not the same here as in the worker whose model all have now, after the same gradients:"
                " did a schedule, a loaded checkpoint or a change of weights differ between workers?",
                affects_result=True,
            )
        for added in filter(None, (state.added() for state in self._states)):
            message = f"parameter {added} is not in all workers the same: the model got it after wrap"
            self._session.warn(message, affects_result=True)

    def _state(self, model: Any, optimizer: Any, prefix: str) -> ModelState:
        """The model's tensors; prefix: of the names of keys. Raises InvalidSettings as ModelState."""
        return ModelState(model, optimizer, prefix)

    @abstractmethod
    def _synchronise(
        self, state: ModelState, model: Any, optimizer: Any, buffers: str, check: BatchCheck
    ) -> Synchroniser:
        """Attach the job's algorithm to an optimizer; blocks until all workers have called this."""

    @abstractmethod
    def _gather(self, name: str, digest: "Array") -> "Future[Array] | None":
        """Collect a digest of each worker, once for each name; see BatchCheck."""

    @abstractmethod
    def _finish(self, wrapped: Sequence[Synchroniser]) -> None:
        """Take part in the other workers' rounds until all are finished."""


def innermost(optimizer: Any) -> Any:
    """The optimizer that takes the steps, within those of Accelerate and Lightning, which decide when it does."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def finish_rounds(wrapped: Sequence[Synchroniser]) -> None:
    """Run `finishing` of all synchronisers side by side, as their rounds end in any order."""
    waiting: dict[Future[None], Iterator[Future[None]]] = {}
    ready = [item.finishing() for item in wrapped]
    while ready or waiting:
        for each in ready:
            if (future := next(each, None)) is not None:
                waiting[future] = each
        ready = [waiting.pop(future) for future in wait(waiting, return_when=FIRST_COMPLETED).done]
