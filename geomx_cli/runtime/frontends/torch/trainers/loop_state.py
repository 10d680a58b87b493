"""The state that a framework's loop saves between two steps, and from which it continues after its worker was killed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime.frontends.torch.packing import unpack_state
from geomx_cli.runtime.frontends.torch.tensors import local
from geomx_cli.runtime.frontends.torch.training_state import TorchState
from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends.torch.store import Store
    from geomx_cli.runtime.training.worker_state import WorkerState

__all__ = ["LOOP", "LoopState", "ModelTensors", "saved_loop"]

LOOP = "loop"
"""The name of the object that is the loop."""


class LoopState(TorchState):
    """The state of a training whose loop is in a framework. Hooks of the framework report the loop's position.

    If an object cannot be saved, a warning names it, and the worker cannot be restarted.

    place: the position in the data that an earlier life saved; without values if it was killed before its first step.
    """

    def __init__(self, store: "Store", given: Mapping[str, Any]) -> None:
        self._of_place: Callable[[], State] = State
        super().__init__(store, given)
        self._returns_to = self._found or State()

    @property
    def place(self) -> State:
        """See the class."""
        return self._returns_to

    def reach(self, epoch: int, batch: int, place: Callable[[], State]) -> None:
        """The loop is between two steps, after so many batches of an epoch. Save if that is due."""
        self.epoch, self._batches, self._of_place = epoch, batch, place
        self._save_if_due()
        self._before_batch()

    def go_on(self) -> None:
        """The loop is at the place again. Random numbers continue as they were there."""
        self._begin_again()

    def save(self) -> None:
        """See TrainingState."""
        try:
            super().save()
        except InvalidSettings as error:
            self._recovery.give_up(f"this worker's training cannot be saved: {error.message}")

    def _state(self) -> State:
        state = super()._state()
        state.add("place", self._of_place())
        return state


def saved_loop(recovery: "WorkerState") -> dict[str, Any] | None:
    """The loop's own state from an earlier life that had reached a step, before it is restored. Otherwise None."""
    state = recovery.peek()
    if state is None or not state.part("place").values:
        return None
    found: dict[str, Any] = unpack_state(state.part("script").part(f"object {LOOP}"))
    return found


class ModelTensors:
    """The state that training changes in a model, as an object that a state saves. It lacks frozen parameters, such as
    the parameters below adapters.

    trained: the parameters that are trained.
    """

    def __init__(self, model: Any, trained: Iterable[Any]) -> None:
        self._model = model
        self._trained = list(trained)

    def parameters(self) -> Iterator[Any]:
        """The parameters that are trained."""
        return iter(self._trained)

    def state_dict(self) -> dict[str, Any]:
        """Tensors by name, and other state that modules keep."""
        own = {id(tensor) for tensor in self._trained}
        tensors = {name: tensor for name, tensor in self._model.named_parameters() if id(tensor) in own}
        return {"trained": tensors, "buffers": dict(self._model.named_buffers()), "extra": self._extra()}

    def _extra(self) -> dict[str, Any]:
        usual = torch.nn.Module.get_extra_state
        modules = self._model.named_modules()
        return {name: each.get_extra_state() for name, each in modules if type(each).get_extra_state is not usual}

    @torch.no_grad()  # type: ignore[untyped-decorator, unused-ignore]
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""
        parameters, buffers = dict(self._model.named_parameters()), dict(self._model.named_buffers())
        for name, tensor in state["trained"].items():
            local(parameters[name]).copy_(tensor)
        for name, tensor in state["buffers"].items():
            known = buffers.get(name)
            if known is not None and known.shape == tensor.shape:
                known.copy_(tensor)
            else:  # a module has made or replaced it
                owner, _, leaf = name.rpartition(".")
                device = known.device if known is not None else self._trained[0].device
                setattr(self._model.get_submodule(owner), leaf, tensor.to(device))
        for name, extra in state["extra"].items():
            self._model.get_submodule(name).set_extra_state(extra)
