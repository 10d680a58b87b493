"""The state that an MXNet script saves and continues from: see geomx_cli.mxnet.state."""

from collections.abc import Mapping
from typing import Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.mxnet.load import load_mxnet
from geomx_cli.runtime.frontends.mxnet.loader_place import place_in
from geomx_cli.runtime.frontends.mxnet.script_objects import Kept, check_complete, kept
from geomx_cli.runtime.frontends.mxnet.store_state import StoreState
from geomx_cli.runtime.script.random_state import random_state, set_random_state
from geomx_cli.runtime.script.training_state import Place, TrainingState
from geomx_cli.runtime.training.model import seed_of
from geomx_cli.runtime.training.worker_algorithm import State

__all__ = ["MxnetState"]

_SEEDS = 2**31 - 1


class MxnetState(TrainingState):
    """See TrainingState. MXNet cannot return the state of its random numbers. So they are seeded before each batch, and
    after each save that the script requests. The seed is made from a number that they gave at the begin, and the place.
    A job without kills does this too.
    """

    def __init__(self, store: StoreState, given: Mapping[str, Any]) -> None:
        self._store = store
        self._kept: dict[str, Kept] = {}
        self._random: State | None = None  # as saved by an earlier life
        self._seed = int(load_mxnet().nd.random.randint(0, _SEEDS, shape=(1,)).asscalar())
        self._saves = 0  # number of saves that the script has requested
        store.begin()
        super().__init__(store.recovery, store.client, given)

    def save(self) -> None:
        """See TrainingState."""
        self._saves += 1
        super().save()
        self._seed_after_save()

    def _save_if_due(self) -> None:
        # When that happens depends on time, so random numbers continue.
        if self._recovery.is_due(self._rounds):
            super().save()

    def _seed_after_save(self) -> None:
        load_mxnet().random.seed(seed_of([self._seed, 0, self._saves]))

    @property
    def _rounds(self) -> int:
        return self._store.rounds

    @property
    def _is_exchanging(self) -> bool:
        return False

    def _complete(self) -> None:
        self._store.complete()

    def _check(self) -> None:
        self._kept.update({name: kept(name, each) for name, each in self._objects.items()})
        check_complete(self._kept)

    def _place_in(self, loader: Any) -> Place:
        return place_in(loader)

    def _before_batch(self) -> None:
        """See TrainingState."""

    def _reseed(self, *place: int) -> None:
        # Count from 1: a seed of (s, 0) would equal (s, 0, 0), and the seed of a save begins with 0.
        load_mxnet().random.seed(seed_of([self._seed, *(int(number) + 1 for number in (self.epoch, *place))]))

    def _of_script(self, objects: Mapping[str, Any]) -> State:
        state = State({"seed": self._seed, "saves": self._saves})
        for name in objects:
            state.add(f"object {name}", self._kept[name].state())
        state.add("store", self._store.state())
        state.add("random", random_state() if self._found is None or self._random is None else self._random)
        return state

    def _load_script(self, objects: Mapping[str, Any], state: State) -> None:
        if missing := [name for name in objects if f"object {name}" not in state.values]:
            what = f"geomx.state had no {missing[0]} when this worker saved its state"
            raise InvalidSettings(what, "give geomx.state the same objects each time that the script runs")
        for name in objects:
            self._kept[name].load(state.part(f"object {name}"))
        self._store.load(state.part("store"))
        self._seed, self._saves = state.values["seed"], state.values["saves"]
        self._random = state.part("random")
        self._begin_again()

    def _begin_again(self) -> None:
        if self._random is not None:
            set_random_state(self._random)
        self._seed_after_save()
