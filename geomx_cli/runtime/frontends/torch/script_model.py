"""A script's model for algorithms that exchange weights; the script's own optimizer takes the steps."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.ps.arrays import Floats
from geomx_cli.runtime.frontends.torch.model_state import ModelState
from geomx_cli.runtime.frontends.torch.tensors import local, read, write
from geomx_cli.runtime.training.model import LocalSteps, ModelWeights, flat_views

if TYPE_CHECKING:
    from geomx_cli.runtime.training.train_config import TrainConfig
    from geomx_cli.runtime.training.worker_algorithm import Stopwatch

__all__ = ["ScriptModel", "last_gradients"]


class ScriptModel(ModelWeights):
    """The trained tensors of `state`.

    statistics: floating-point buffers to exchange too, by key.
    written: the numbers of the parameters that the algorithm has written since it was last cleared. For statistics, it
        has the number of parameters. The other workers with the same model get these tensors. Raises InvalidSettings
        for a float64 tensor, because weights are exchanged in float32.
    """

    def __init__(self, state: ModelState, statistics: Mapping[str, Any]) -> None:
        self.parameters = list(state.trained.values())
        names = [f"{state.prefix}{name}" for name in state.trained]
        super().__init__(names, [local(parameter).numel() for parameter in self.parameters])
        self._statistics = statistics
        self.written: set[int] = set()
        for name, parameter in state.trained.items():
            if parameter.dtype == torch.float64:
                what = f"parameter {name} is of float64, and this algorithm exchanges weights in float32"
                raise InvalidSettings(what, "train in float32, or with --algo fsa")

    def local_steps(self, config: "TrainConfig") -> LocalSteps:
        """See ModelWeights."""
        return _ScriptSteps(self)

    def read_weights(self, out: Floats) -> None:
        """See ModelWeights."""
        for part, parameter in zip(flat_views(out, self.sizes), self.parameters, strict=True):
            read(parameter, part)

    def write_weights(self, vector: Floats) -> None:
        """See ModelWeights."""
        for index, part in enumerate(flat_views(vector, self.sizes)):
            self.write_weight(index, part)

    def write_weight(self, index: int, value: Floats) -> None:
        """See ModelWeights."""
        self.written.add(index)
        write(self.parameters[index], value)

    def read_gradient(self, index: int, out: Floats) -> None:
        """See ModelWeights; zeros where there is none."""
        gradient = self.parameters[index].grad
        if gradient is None:
            out[:] = 0
        else:
            read(gradient, out)

    def read_statistics(self) -> dict[str, Floats]:
        """See ModelWeights."""
        found = {}
        for key, tensor in self._statistics.items():
            found[key] = np.empty(tensor.numel(), np.float32)
            read(tensor, found[key])
        return found

    def write_statistics(self, values: Mapping[str, Floats]) -> None:
        """See ModelWeights."""
        self.written.add(len(self.parameters))
        for key, value in values.items():
            write(self._statistics[key], value)


class _ScriptSteps(LocalSteps):
    """Counts the steps that the script's optimizer has taken.

    A weight is the memory of the tensor itself if that is contiguous, float32 and on the CPU. Otherwise it is a copy
    that is made after each step, once it is needed.
    """

    def __init__(self, model: ScriptModel) -> None:
        super().__init__()
        self._model = model
        self._weights: list[Floats] = []
        self._is_current = False

    @property
    def weights(self) -> Sequence[Floats]:
        """See LocalSteps."""
        if not self._is_current:
            self._weights = [_elements(parameter) for parameter in self._model.parameters]
            self._is_current = True
        return self._weights

    def begin(self) -> None:
        """See LocalSteps."""
        self._is_current = False

    def step(self, samples: int, watch: "Stopwatch") -> None:
        """See LocalSteps. The script has taken the step."""
        self.count += 1
        self.samples += samples
        self._is_current = False

    def put(self, index: int, value: Floats) -> Floats:
        """See LocalSteps."""
        parameter = self._model.parameters[index]
        self._model.write_weight(index, value)
        held = value if parameter.dtype == torch.float32 else _elements(parameter)
        own = self._weights[index] if self._is_current else None
        if own is not None and not np.shares_memory(own, _elements(parameter)):
            own[:] = held
        return held


def last_gradients(state: ModelState) -> list[Floats]:
    """The elements of the gradients nearest to the output, up to the first matrix. A backward pass computes these
    first. None if there is no matrix. Of a sparse gradient, its stored elements.
    """
    found = []
    for parameter in reversed(state.trained.values()):
        if (gradient := parameter.grad) is not None:
            found.append(_elements(gradient.coalesce().values() if gradient.is_sparse else gradient))
            if parameter.ndim > 1:
                break
    return found


def _elements(tensor: Any) -> Floats:
    """A tensor's elements in float32, in its own memory if possible."""
    flat: Floats = local(tensor).to("cpu", torch.float32).contiguous().view(-1).numpy()
    return flat
