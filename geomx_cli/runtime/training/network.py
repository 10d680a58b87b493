"""What a network is to the bundled training job: its architecture, and how a copy of it is made."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from geomx_cli.runtime.training.architecture import Architecture
from geomx_cli.runtime.training.model import ModelAdapter

__all__ = ["Network"]


@dataclass(frozen=True)
class Network(Architecture):
    """An architecture that a framework can compute.

    adapter: makes the model of `build`. session: a context for building and training on a device ("" is the CPU,
    "gpuN" the only GPU that this process is shown), with the framework's random numbers, which layers such as dropout
    draw, begun from a seed; entering it raises InvalidSettings for a device that cannot be used.
    """

    adapter: "Callable[[Network], ModelAdapter]"
    session: Callable[[str, int], AbstractContextManager[object]]

    def build(self) -> ModelAdapter:
        """A copy of the network, whose weights are zero."""
        return self.adapter(self)
