"""Front ends: each joins a training framework to geomx. They are the packages here, named as the module that scripts
import; importing one loads neither the framework nor numpy.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.network import Network

__all__ = [
    "NAMES", "Frontend", "ScriptFrontend", "ScriptSession", "ScriptStore", "find",
    "loaded", "of_framework", "prepare_imports",
]  # fmt: skip

NAMES = ("numpy", "mxnet")
"""All front ends."""


class Frontend(Protocol):
    """What every front end has: models for the bundled job."""

    @property
    def framework(self) -> str:
        """The module that its workers need beside numpy; "" for none, then scripts have no use for the front end."""

    @property
    def networks(self) -> tuple[str, ...]:
        """The values of --network that it trains."""

    def network(self, name: str, shape: "Shape", classes: int) -> "Network":
        """One of `networks`, or of a user's own where it takes these, with a ModelAdapter behind it.

        Raises InvalidSettings where the framework is missing, and for images that the network cannot take.
        """


class ScriptFrontend(Frontend, Protocol):
    """What one with a framework has in addition: a store for scripts."""

    def prepare_import(self) -> None:
        """What the framework needs before it is imported."""

    def attach(self, framework: Any, session: "ScriptSession") -> None:
        """Put our store into the framework, which a script is importing. `session` connects when it is first used."""


class ScriptStore(Protocol):
    """What a script's session needs of the store."""

    @property
    def failure(self) -> BaseException | None:
        """What has gone wrong in the background, if anything."""

    @property
    def calls(self) -> int:
        """How often the script has used it."""

    def settle(self) -> None:
        """Wait for everything that the script has begun. Raises what has failed, as an error of the framework's."""


class ScriptSession(Protocol):
    """The script's part in the job. store: set by the front end when it has made one."""

    store: ScriptStore | None

    def connect(self) -> "Client":
        """Join the job. Raises GeomxError where that is not possible."""


def find(name: str) -> Frontend:
    """The front end of this name."""
    return cast(Frontend, importlib.import_module(f"{__name__}.{name}"))


def of_framework(module: str) -> ScriptFrontend | None:
    """The front end of a framework, by the name of its module; None for any other module."""
    found = find(module) if module in NAMES else None
    return cast(ScriptFrontend, found) if found is not None and found.framework else None


def loaded() -> bool:
    """Whether this process has imported a framework."""
    return any(find(name).framework in sys.modules for name in NAMES)


def prepare_imports() -> None:
    """Prepare the import of every framework, before code runs that may import one."""
    for name in NAMES:
        if (found := of_framework(name)) is not None:
            found.prepare_import()
