"""The front end without a framework: models computed in numpy."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network

__all__ = ["network"]


def network(name: str, shape: "Shape", classes: int, sizes: tuple[int, int]) -> "Network":
    """See Frontend.network."""
    from geomx_cli.runtime.frontends.numpy import linear

    return linear.network(shape, classes)
