"""Context managers that make an existing training loop distributed."""

from types import TracebackType
from typing import Any, Generic, TypeVar

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime import script
from geomx_cli.runtime.frontends.torch import load

__all__ = ["DiLoCo", "LocalSGD", "Training"]

_Optimizer = TypeVar("_Optimizer")


class Training(Generic[_Optimizer]):
    """`with Training(model, optimizer):` around a training loop: `wrap` before it, and `finish` after it.

    It is for any `geomx launch --algo`. Call `init` first. The `with` statement gives the optimizer. To train several
    models together, give one `with` statement several of them; the first that ends calls `finish` for all. An exception
    leaves the block without `finish`. If it ends this script, the other workers' scripts end too, with its text.

    Args:
        model: See `wrap`.
        optimizer: See `wrap`.
        buffers: See `wrap`.

    Examples:
        >>> with geomx.Training(model, optimizer):
        ...     for images, labels in loader:
        ...         ...
    """

    def __init__(self, model: Any, optimizer: _Optimizer, *, buffers: str = "local") -> None:
        self._model, self._optimizer, self._buffers = model, optimizer, buffers

    def __enter__(self) -> _Optimizer:
        store = load.joined(script.session())
        algorithms = plugins.algorithms()
        algorithm = algorithms[str(store.option("algo"))]
        if not self._stands_for(algorithm):
            possible = " or ".join(name for name, each in algorithms.items() if self._stands_for(each))
            what = f"geomx_cli.torch.{type(self).__name__} in a job of --algo {algorithm.name}"
            hint = f"launch it with --algo {possible}, or write geomx_cli.torch.Training for any"
            raise InvalidSettings(what, hint)
        store.wrap(self._model, self._optimizer, self._buffers)
        return self._optimizer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            load.joined(script.session()).finish()

    def _stands_for(self, algorithm: plugins.Algorithm) -> bool:
        """Whether a job with this algorithm does what the class says."""
        return True


class DiLoCo(Training[_Optimizer]):
    """A `Training` for jobs with --algo diloco: local steps, then an outer step with the mean of the differences.

    Options of `geomx launch` set the number of local steps, the outer learning rate, momentum and fragments.
    """

    def _stands_for(self, algorithm: plugins.Algorithm) -> bool:
        return algorithm.outer_step


class LocalSGD(Training[_Optimizer]):
    """A `Training` for jobs with --algo hfa or esync: local steps, then the mean of all weights.

    With hfa, parties first compute the mean of their own workers (--k1, --k2).
    """

    def _stands_for(self, algorithm: plugins.Algorithm) -> bool:
        return algorithm.exchanges == "weights" and not (algorithm.outer_step or algorithm.standalone)
