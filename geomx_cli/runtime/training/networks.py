"""The networks of the bundled training job: those that the front ends have by name, and users' own.

Nothing is loaded for a name, not even numpy. Weights are always drawn in numpy: no framework's random numbers decide
where a job starts.
"""

from typing import TYPE_CHECKING

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.runtime import frontends
from geomx_cli.runtime.frontends import Frontend
from geomx_cli.runtime.training.catalog import is_own

if TYPE_CHECKING:
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.network import Network

__all__ = ["check", "find", "framework", "names"]

_OWN = "mxnet"  # a user's own network is a gluon block


def names() -> tuple[str, ...]:
    """The networks with a name of their own."""
    return tuple(name for frontend in frontends.NAMES for name in frontends.find(frontend).networks)


def check(name: str) -> None:
    """Raises InvalidSettings for a network that there is not; whether a user's own works is seen when it is used."""
    _frontend(name)


def framework(name: str) -> str:
    """The module that workers need beside numpy to train a network; "" for none. Raises what `check` does."""
    return _frontend(name).framework


def find(name: str, shape: "Shape" = (1, 28, 28), classes: int = 10) -> "Network":
    """The network for images of `shape`: channels, height, width. Of linear, cnn and cnn-bn the tensors come without a
    framework, so the master worker, which only hands initial weights to the global servers, needs none.

    Raises InvalidSettings for an unknown network, images that it cannot take, and a user's function that fails.
    """
    return _frontend(name).network(name, shape, classes)


def _frontend(name: str) -> Frontend:
    """The front end that trains a network."""
    for each in map(frontends.find, frontends.NAMES):
        if name in each.networks:
            return each
    if not is_own(name):
        hint = f"choose one of {', '.join(names())}, or write MODULE:FUNCTION for one of your own"
        raise InvalidSettings(f"--network {name}: there is no such network", hint)
    return frontends.find(_OWN)
