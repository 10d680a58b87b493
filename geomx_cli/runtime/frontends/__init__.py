"""Front ends: each connects geomx to a training framework. They are the subpackages, named like the module that scripts
import; importing one loads neither the framework nor numpy.
"""

import importlib
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from geomx_cli.ps.client import Client
    from geomx_cli.runtime.script.base_store import ScriptStore
    from geomx_cli.runtime.training.architecture import Shape
    from geomx_cli.runtime.training.model import Network

__all__ = [
    "HOOKED", "JOINING", "NAMES", "Frontend", "ScriptFrontend", "ScriptSession", "find", "loaded", "of_module",
    "prepare_imports",
]  # fmt: skip

NAMES = ("numpy", "torch", "mxnet")
"""The names of all front ends, preferred ones first."""
HOOKED: Mapping[str, str] = {
    "mxnet": "mxnet", "torch.distributed.distributed_c10d": "torch", "torch.optim.optimizer": "torch",
    "torch.distributed.checkpoint.state_dict_saver": "torch",
}  # fmt: skip
"""Modules of frameworks that scripts import, and the front ends that hook them."""
JOINING: Mapping[str, str] = {
    "mxnet": 'every worker must create the store, kv.create("dist_sync"), and use it',
    "torch": "every worker must call geomx.init and geomx.wrap, or train with DistributedDataParallel;"
    " docs/how-to/three-lines.md",
}
"""How a script of each framework joins the job, as a hint."""


class Frontend(Protocol):
    """Interface of every front end: models for the bundled job."""

    @property
    def framework(self) -> str:
        """The module that its workers need besides numpy; "" for none: then it has nothing for scripts."""

    @property
    def networks(self) -> tuple[str, ...]:
        """The values of --network that it supports."""

    def network(self, name: str, shape: "Shape", classes: int, sizes: tuple[int, int]) -> "Network":
        """Return one of `networks`, or a user's own if supported, with its ModelAdapter. sizes: layers and
        their width, for gpt.

        Raises InvalidSettings if the framework is missing, and for image shapes that the network does not support.
        """


class ScriptFrontend(Frontend, Protocol):
    """Additional interface of a front end in HOOKED: a store for scripts of the framework."""

    def prepare_import(self) -> None:
        """Prepare the process for importing the framework."""

    def attach(self, module: Any, session: "ScriptSession") -> None:
        """Hook a module in HOOKED, which a script is importing or has imported; `session` connects at its first use."""


class ScriptSession(Protocol):
    """The script's membership of the job. store: set by the front end when it has created one."""

    store: "ScriptStore | None"

    @property
    def num_all_workers(self) -> int:
        """Number of training workers of the job, also before `connect`; 0 if that is unknown then."""

    def attach(self) -> None:
        """Leave the job when the script ends. Idempotent."""

    def connect(self) -> "Client":
        """Join the job. Raises GeomxError on failure."""

    def abort(self, error: BaseException) -> None:
        """Report that the script has failed. Idempotent."""

    def warn(self, message: str, *, affects_result: bool = False) -> None:
        """Write a warning to the event log and to stderr; also before `connect`. affects_result: see
        WarningRaised.
        """


def find(name: str) -> Frontend:
    """Return the front end of this name."""
    return cast(Frontend, importlib.import_module(f"{__name__}.{name}"))


def of_module(module: str) -> ScriptFrontend | None:
    """Return the front end that hooks this module of a framework; None if none does."""
    return cast(ScriptFrontend, find(HOOKED[module])) if module in HOOKED else None


def loaded() -> bool:
    """Return whether this process has imported a framework."""
    return any(find(name).framework in sys.modules for name in NAMES)


def prepare_imports() -> None:
    """Prepare the import of every framework, before running code that may import one."""
    for name in set(HOOKED.values()):
        cast(ScriptFrontend, find(name)).prepare_import()
