"""The networks of the bundled training job: those of the front ends, and users' own.

Initial weights are always drawn in numpy, independent of the framework's random numbers.
"""

from typing import TYPE_CHECKING

from geomx_cli.contract.frontends import frontend_for
from geomx_cli.runtime import frontends

if TYPE_CHECKING:
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network

__all__ = ["find"]


def find(
    name: str, shape: "Shape" = (1, 28, 28), classes: int = 10, framework: str = "auto", layers: int = 4,
    width: int = 192,
) -> "Network":  # fmt: skip
    """Return the network for images of `shape`: channels, height, width; for gpt, of `layers` of `width`, (1, 1,
    characters). The tensors of linear, cnn, cnn-bn and gpt are defined without a framework, so the master worker, which
    only sends initial weights to the global servers, needs none.

    Raises InvalidSettings for an unknown network, unsupported images, and a user's function that fails.
    """
    return frontends.find(frontend_for(name, framework)).network(name, shape, classes, (layers, width))
