"""The state that a PyTorch script saves and continues from: see geomx_cli.torch.state."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.data import steps_taken
from geomx_cli.runtime.frontends.torch.loader_place import place_in
from geomx_cli.runtime.frontends.torch.packing import pack_state, unpack_state
from geomx_cli.runtime.frontends.torch.random_state import random_state, set_random_state
from geomx_cli.runtime.frontends.torch.tensors import is_divided, set_gradient
from geomx_cli.runtime.script.training_state import Place, TrainingState
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.store import Store

__all__ = ["TorchState"]


class TorchState(TrainingState):
    """See TrainingState. Wrap before creating it, because the wrapped models and optimizers have to be among its
    objects.
    """

    def __init__(self, store: "Store", given: Mapping[str, Any]) -> None:
        self._store = store
        self._steps = -1  # steps of all optimizers when the script got its last batch
        self._random: State | None = None  # as saved by an earlier life
        super().__init__(store.recovery, store.client, given)
        store.save = self.save

    @property
    def _rounds(self) -> int:
        return self._store.rounds

    @property
    def _is_exchanging(self) -> bool:
        return any(item.exchanging for item in self._store.wrapped)

    def _complete(self) -> None:
        for item in self._store.wrapped:
            item.complete()

    def _check(self) -> None:
        if not self._store.wraps:
            what = "geomx.state before geomx.wrap, or in a script that wraps no optimizer"
            raise InvalidSettings(what, "call geomx.wrap, or enter geomx.Training, before it")
        for name, each in self._objects.items():
            if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
                what = f"{name} is a {type(each).__name__}, which has no state_dict and load_state_dict"
                raise InvalidSettings(what, "give geomx.state objects that have both, and numbers")
        self._store.check_complete(list(self._objects.values()))

    def _place_in(self, loader: Any) -> Place:
        return place_in(loader, "the loader")

    def _random_numbers(self) -> State:
        return random_state()

    def _set_random_numbers(self, state: State) -> None:
        set_random_state(state)

    def _before_batch(self) -> None:
        self._steps = steps_taken()

    def _of_script(self, objects: Mapping[str, Any]) -> State:
        state = State()
        for name, each in objects.items():
            state.add(f"object {name}", pack_state(each.state_dict(), name))
        for index, item in enumerate(self._store.wrapped):
            state.add(f"wrapped {index}", item.state())
        # Save gradients only if no step has followed them: then they are accumulated, or their step was skipped.
        kept = [] if self._steps != steps_taken() else [tensor.grad for tensor in self._store.trained]
        state.add("gradients", pack_state(kept, "gradients"))
        state.add("random", random_state())
        state.add("store", self._store.kept())
        return state

    def _load_script(self, objects: Mapping[str, Any], state: State) -> None:
        divided = [tensor for tensor in self._store.trained if is_divided(tensor)]
        for name, each in objects.items():
            each.load_state_dict(unpack_state(state.part(f"object {name}"), divided))
        for index, item in enumerate(self._store.wrapped):
            item.load(state.part(f"wrapped {index}"))
        gradients = unpack_state(state.part("gradients"))
        for tensor, gradient in zip(self._store.trained if gradients else (), gradients, strict=True):
            if gradient is not None:
                set_gradient(tensor, gradient.to(tensor.device))
        self._store.go_on(state.part("store"))
        self._random = state.part("random")
        self._begin_again()

    def _begin_again(self) -> None:
        if self._random is not None:
            set_random_state(self._random)
