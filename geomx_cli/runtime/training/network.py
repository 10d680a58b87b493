"""A network of the bundled training job: its architecture, and a factory for copies."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from geomx_cli.runtime.training.architecture import Architecture
from geomx_cli.runtime.training.model import ModelAdapter

__all__ = ["Network"]


@dataclass(frozen=True)
class Network(Architecture):
    """An architecture that a framework can compute.

    adapter: creates the model of `build`. session: a context for building and training on a device ("" is the CPU,
    "gpuN" the only GPU visible to this process), which seeds the framework's random numbers, used by layers such as
    dropout; entering it raises InvalidSettings for an unusable device.
    """

    adapter: "Callable[[Network], ModelAdapter]"
    session: Callable[[str, int], AbstractContextManager[object]]

    def build(self) -> ModelAdapter:
        """Return a copy of the network with zero weights."""
        return self.adapter(self)
