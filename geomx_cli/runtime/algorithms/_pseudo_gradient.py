"""Exchange of a worker's accumulated local steps, for DiLoCo and ESync."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from geomx_cli.runtime.training.worker_algorithm import State

if TYPE_CHECKING:
    from geomx_cli.ps.arrays import Array
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.model import ModelWeights
    from geomx_cli.runtime.training.train_config import TrainConfig

__all__ = ["PseudoGradient"]


class PseudoGradient:
    """Pushes the difference of this worker's weights to the last global ones, and receives new ones.

    origin: the last global weights received, by tensor. Tensors are named by their index in the model. What the
    model's dtype has rounded in them (bfloat16, float16) is no step of this worker, and is left out of the difference.
    For the training thread only.
    """

    def __init__(self, client: "Client", model: "ModelWeights", config: "TrainConfig") -> None:
        from geomx_cli.runtime.training.tensor_rounds import TensorRounds

        self.steps = model.local_steps(config)
        self.tensors = range(len(model.names))
        self._rounds = TensorRounds(client, model)
        self._model = model
        self._pushed: dict[int, Array] = {}
        self._rounding: dict[int, Array] = {}
        self.origin: list[Array] = []

    def state(self) -> State:
        """Return what is kept while no exchange is pending."""
        state = State()
        state.add("steps", self.steps.state())
        state.add("origin", State({}, {str(index): origin for index, origin in enumerate(self.origin)}))
        state.add("rounding", State({}, {str(index): lost for index, lost in self._rounding.items()}))
        return state

    def load(self, state: State) -> None:
        """Continue from a `state`, once the model has its weights."""
        self.steps.load(state.part("steps"))
        origin, rounding = state.named("origin"), state.named("rounding")
        self.origin = [origin[str(index)].copy() for index in self.tensors]
        self._rounding = {int(index): lost.copy() for index, lost in rounding.items()}

    def start(self) -> None:
        """Pull the initial weights from the servers."""
        self._rounds.pull()
        self.steps.begin()
        self.origin = [weight.copy() for weight in self.steps.weights]

    def push(self, tensors: Iterable[int], weight: float = 1.0, *, continues: bool = False) -> None:
        """Begin a round of these tensors; the differences have this weight in the mean. continues: steps follow before
        `adopt`, which keeps them.
        """
        import numpy as np

        for index in tensors:
            own = self.steps.weights[index]
            if continues:
                self._pushed[index] = own.copy()
            difference = np.subtract(self.origin[index], own, out=self._rounds.buffers[index])
            if index in self._rounding:
                difference += self._rounding[index]
            if weight != 1:
                difference *= np.float32(weight)
            self._rounds.push(index, weight)

    def abstain(self, tensors: Iterable[int]) -> None:
        """Abstain from a round of these tensors."""
        for index in tensors:
            self._rounds.abstain(index)

    def return_to_origin(self) -> None:
        """Replace this worker's weights by the global ones."""
        for index, origin in enumerate(self.origin):
            self._set(index, origin)

    def receive(self, tensors: Iterable[int]) -> None:
        """Wait for the round's new weights, and leave this worker's as they are."""
        for index in tensors:
            self._rounds.wait([index])
            self.origin[index][:] = self._rounds.buffers[index]

    def adopt(self, tensors: Iterable[int], mix: float = 0.0) -> None:
        """Wait for the round's new weights and continue from them, with the steps since a `push` that continues.
        mix: the fraction of the pushed weights that is kept.
        """
        for index in tensors:
            self.receive([index])
            origin, own = self.origin[index], self.steps.weights[index]
            pushed = self._pushed.pop(index, None)
            new = origin if pushed is None else origin + mix * (pushed - origin) + (own - pushed)
            self._set(index, new)

    def _set(self, index: int, new: "Array") -> None:
        held = self.steps.put(index, new)
        if held is not new:
            self._rounding[index] = held - new
