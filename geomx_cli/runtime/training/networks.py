"""The networks of the bundled training job: those named by the front ends, and users' own.

Looking up a name loads nothing, not even numpy. Initial weights are always drawn in numpy, independent of the
framework's random numbers.
"""

from typing import TYPE_CHECKING

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.nearest import nearest
from geomx_cli.runtime import frontends
from geomx_cli.runtime.frontends import Frontend
from geomx_cli.runtime.training.catalog import is_own

if TYPE_CHECKING:
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.network import Network

__all__ = ["check", "find", "framework", "names"]

_OWN = "mxnet"  # a user's own network is a gluon block


def names() -> tuple[str, ...]:
    """Return the names of the built-in networks."""
    return tuple(name for frontend in frontends.NAMES for name in frontends.find(frontend).networks)


def check(name: str) -> None:
    """Raises InvalidSettings for an unknown network; a user's own is checked only when used."""
    _frontend(name)


def framework(name: str) -> str:
    """Return the module that workers need besides numpy to train a network; "" for none. Raises as `check` does."""
    return _frontend(name).framework


def find(name: str, shape: "Shape" = (1, 28, 28), classes: int = 10) -> "Network":
    """Return the network for images of `shape`: channels, height, width. The tensors of linear, cnn and cnn-bn are
    defined without a framework, so the master worker, which only sends initial weights to the global servers, needs
    none.

    Raises InvalidSettings for an unknown network, unsupported images, and a user's function that fails.
    """
    return _frontend(name).network(name, shape, classes)


def _frontend(name: str) -> Frontend:
    """Return the front end that trains a network."""
    for each in map(frontends.find, frontends.NAMES):
        if name in each.networks:
            return each
    if not is_own(name):
        hint = f"{nearest(name, names())}, or write MODULE:FUNCTION for one of your own"
        raise InvalidSettings(f"--network {name}: there is no such network", hint)
    return frontends.find(_OWN)
