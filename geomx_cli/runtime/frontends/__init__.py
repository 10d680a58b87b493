"""Front ends: each connects geomx to a training framework. They are the subpackages, each with the name of the module
that scripts import. Importing a front end loads neither the framework nor numpy.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any, Protocol, cast

from geomx_cli.contract.frontends import FRONTENDS, HOOKED

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.script.base_store import ScriptStore
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network
    from geomx_cli.runtime.training.worker_state import WorkerState

__all__ = ["Frontend", "ScriptFrontend", "ScriptSession", "find", "loaded", "of_module", "prepare_imports"]


class Frontend(Protocol):
    """Interface of every front end: models for the bundled job."""

    def network(self, name: str, shape: "Shape", classes: int, sizes: tuple[int, int]) -> "Network":
        """Return one of its networks (contract/frontends.py), or a user's own if supported, with its ModelAdapter.

        sizes: number of layers, and their width, for gpt.

        Raises InvalidSettings if the framework is missing, and for image shapes that the network does not support.
        """


class ScriptFrontend(Frontend, Protocol):
    """Additional interface of a front end in HOOKED: a store for scripts of the framework."""

    def prepare_import(self) -> None:
        """Prepare the process for importing the framework."""

    def attach(self, module: Any, session: "ScriptSession") -> None:
        """Hook a module in HOOKED, which a script imports or has imported. `session` connects at its first use."""


class ScriptSession(Protocol):
    """The script's membership of the job.

    store: the front end sets it when it has created a store.
    recovery: the state that an earlier life of this worker has saved; None before `connect`.
    """

    store: "ScriptStore | None"
    recovery: "WorkerState | None"

    @property
    def num_all_workers(self) -> int:
        """Number of training workers of the job, also before `connect`; 0 if it is then unknown."""

    def attach(self) -> None:
        """Leave the job when the script ends. Idempotent."""

    def connect(self) -> "Client":
        """Join the job. Raises GeomxError on failure."""

    def abort(self, error: BaseException) -> None:
        """Report that the script has failed. Idempotent."""

    def warn(self, message: str, *, affects_result: bool = False) -> None:
        """Write a warning to the event log and to stderr, also before `connect`.

        affects_result: see WarningRaised.
        """


def find(name: str) -> Frontend:
    """Return the front end of this name."""
    return cast(Frontend, importlib.import_module(f"{__name__}.{name}"))


def of_module(module: str) -> ScriptFrontend | None:
    """Return the front end that hooks this module of a framework; None if none hooks it."""
    return cast(ScriptFrontend, find(HOOKED[module])) if module in HOOKED else None


def loaded() -> bool:
    """Return whether this process has imported a framework."""
    return any(each.framework in sys.modules for each in FRONTENDS.values())


def prepare_imports() -> None:
    """Prepare the import of every framework, before running code that may import one."""
    for name in set(HOOKED.values()):
        cast(ScriptFrontend, find(name)).prepare_import()
