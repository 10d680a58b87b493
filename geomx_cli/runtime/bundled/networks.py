"""The networks of the bundled training job: those named by the front ends, and users' own.

Looking up a name loads nothing, not even numpy. Initial weights are always drawn in numpy, independent of the
framework's random numbers.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.nearest import nearest
from geomx_cli.runtime import frontends
from geomx_cli.runtime.data.catalog import is_own
from geomx_cli.runtime.frontends import Frontend

if TYPE_CHECKING:
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network

__all__ = ["check", "find", "framework_for", "names", "needs"]

_AUTO = "auto"


def names() -> tuple[str, ...]:
    """Return the names of the built-in networks."""
    return tuple(dict.fromkeys(name for frontend in frontends.NAMES for name in frontends.find(frontend).networks))


def framework_for(name: str) -> str:
    """Return the framework that --framework auto means for a network: the preferred one that is installed in this
    Python, or if none is, the preferred one. Any framework will do for a user's network, for one that is unknown, and
    for one that needs none.
    """
    having = [each for each in map(frontends.find, frontends.NAMES) if each.framework]
    fitting = [each.framework for each in having if name in each.networks] or [each.framework for each in having]
    return next((each for each in fitting if find_spec(each) is not None), fitting[0])


def check(name: str, framework: str = _AUTO) -> None:
    """Raises InvalidSettings for a network that is unknown, or that --framework does not have; a user's own is checked
    only when used.
    """
    _frontend(name, framework)


def needs(name: str, framework: str = _AUTO) -> str:
    """Return the module that workers need besides numpy to train a network; "" for none. Raises as `check` does."""
    return _frontend(name, framework).framework


def find(
    name: str, shape: "Shape" = (1, 28, 28), classes: int = 10, framework: str = _AUTO, layers: int = 4,
    width: int = 192,
) -> "Network":  # fmt: skip
    """Return the network for images of `shape`: channels, height, width; for gpt, of `layers` of `width`, (1, 1,
    characters). The tensors of linear, cnn, cnn-bn and gpt are
    defined without a framework, so the master worker, which only sends initial weights to the global servers, needs
    none.

    Raises InvalidSettings for an unknown network, unsupported images, and a user's function that fails.
    """
    return _frontend(name, framework).network(name, shape, classes, (layers, width))


def _frontend(name: str, framework: str) -> Frontend:
    """Return the front end that trains a network."""
    if framework == _AUTO:
        framework = framework_for(name)
    for each in map(frontends.find, frontends.NAMES):
        if name in each.networks and each.framework in ("", framework):
            return each
    if is_own(name):
        return frontends.find(framework)
    if name in names():
        hint = f"with it choose one of {', '.join(frontends.find(framework).networks)}, or another --framework"
        raise InvalidSettings(f"--network {name}: there is none for --framework {framework}", hint)
    hint = f"{nearest(name, names())} (one of your own: MODULE:FUNCTION)"
    raise InvalidSettings(f"--network {name}: there is no such network", hint)
