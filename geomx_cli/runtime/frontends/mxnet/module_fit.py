"""A Module.fit that saves its state: see geomx_cli.mxnet.fit."""

from collections.abc import Callable, Iterator
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.frontends.mxnet.store_state import StoreState
from geomx_cli.runtime.frontends.mxnet.training_state import MxnetState
from geomx_cli.runtime.script.random_state import random_state, set_random_state
from geomx_cli.runtime.script.training_state import Place
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["fit"]


def fit(module: Any, train_data: Any, store: Callable[[], StoreState], **arguments: Any) -> None:
    """See geomx_cli.mxnet.fit.

    store: returns the state of the worker's store. Call it when the module has joined the job.
    """
    base = load_mxnet().mod.BaseModule
    if not isinstance(module, base) or type(module).fit is not base.fit:
        what = f"geomx.fit of a {type(module).__name__}, whose loop is not that of Module.fit"
        raise InvalidSettings(what, "write the loop with geomx.state(module=module), and its batches")
    loop = _Loop(module, train_data, store, int(arguments.pop("begin_epoch", 0)))
    module.forward_backward = loop.forward_backward
    try:
        module.fit(_Batches(train_data, loop), begin_epoch=_Begin(loop), **arguments)
    finally:
        del module.forward_backward


class _Begin:
    """The number of the first epoch. `fit` reads it when the module is bound, and has its weights and optimizer."""

    def __init__(self, loop: "_Loop") -> None:
        self._loop = loop

    def __index__(self) -> int:
        return self._loop.begin()


class _Batches:
    """The script's iterator. Its batches pass through the loop."""

    def __init__(self, iterator: Any, loop: "_Loop") -> None:
        self._iterator, self._loop = iterator, loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def __iter__(self) -> Iterator[Any]:
        return self._loop.epoch()


class _Loop:
    """The loop of `fit`. `fit` gets the next batch before it has finished the present one, so the loop does not save
    there.

    Before each step it saves the state after the last step, and the place in the data before this step's batch.
    """

    def __init__(self, module: Any, iterator: Any, store: Callable[[], StoreState], first: int) -> None:
        self._module, self._iterator, self._store = module, iterator, store
        self._forward_backward = module.forward_backward
        self._first = first
        self._state: _FitState | None = None
        self._epochs = 0  # number of epochs that have begun

    def begin(self) -> int:
        """Begin to save, or continue from a saved state. Returns the first epoch."""
        self._state = _FitState(self._store(), {"module": self._module, "epoch": self._first})
        return int(self._state.epoch)

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch. In the first epoch, begin at the saved place."""
        state = self._state
        assert state is not None
        if self._epochs:
            state.next_epoch()
        self._epochs += 1
        return state.fetched(self._iterator)

    def forward_backward(self, batch: Any) -> None:
        """Save, if that is due. Then call the module's own method."""
        assert self._state is not None
        self._state.before_step()
        self._forward_backward(batch)


class _FetchPlace(Place):
    """The place before the batch that was fetched last, and the random numbers at that time."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._before = State()
        self.begins_first = place.begins_first

    def begin(self) -> Iterator[Any]:
        return self._place.begin()

    def advance(self) -> None:
        """The next batch is about to be fetched."""
        self._before = State({"fetch": True})
        self._before.add("place", self._place.state())
        self._before.add("random", random_state())

    def fetched(self) -> None:
        """The next batch has been fetched."""
        self._place.advance()

    def state(self) -> State:
        return self._before

    def load(self, state: State, batches: int) -> None:
        self._place.load(state.part("place"), batches)

    @staticmethod
    def return_to(state: State) -> None:
        """Set random numbers as they were before the batch was fetched."""
        set_random_state(state.part("random"))


class _FitState(MxnetState):
    """The state of a `fit`."""

    def next_epoch(self) -> None:
        """An epoch is over, with its evaluation."""
        self.epoch += 1
        self._batches = 0

    def fetched(self, iterator: Any) -> Iterator[Any]:
        """Yield the batches of an epoch, from the place at which an earlier life was killed."""
        place = _FetchPlace(self._place_in(iterator))
        found, self._found = self._found, None
        batches: Iterator[Any] | None = None
        if found is not None and not found.values:
            found = None
        if found is not None:
            place.load(found, self._batches)
        if place.begins_first or (found is not None and self._batches):
            self._reseed(0, 0)
            batches = place.begin()
        if found is not None:
            place.return_to(found)
        self._place, number = place, self._batches
        while True:
            place.advance()
            self._reseed(0, number)
            batches = place.begin() if batches is None else batches
            try:
                batch = next(batches)
            except StopIteration:
                return
            place.fetched()
            if found is not None:
                self._begin_again()
                found = None
            yield batch
            number += 1

    def before_step(self) -> None:
        """A batch has been fetched. The previous batch is finished, and so are the script's callbacks after it."""
        self._save_if_due()
        self._reseed(0, self._batches, 0)
        self._batches += 1
