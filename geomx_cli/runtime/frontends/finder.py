"""Hooks the first import of a framework. Loaded before every script, so it imports almost nothing."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from geomx_cli.contract.frontends import HOOKED
from geomx_cli.runtime import frontends

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptFrontend

__all__ = ["has_run", "install", "installed"]

_PACKAGE = os.path.realpath(f"{os.path.dirname(__file__)}/../..")  # noqa: PTH120


_prepared = False


def install() -> None:
    """Install the import hook. Frameworks get geomx's store when they are imported, PyTorch also afterwards.
    Idempotent.
    """
    global _prepared  # noqa: PLW0603  # one for each process
    if _prepared:
        return
    _prepared = True
    sys.meta_path.insert(0, _Finder())
    for name in HOOKED:
        if name != "mxnet" and name in sys.modules:  # MXNet may not be prepared as required
            _attach(name, sys.modules[name])


def has_run() -> bool:
    """Return whether `install` has been called: this process runs a script, and reports its failure."""
    return _prepared


def installed() -> bool:
    """Return whether the hook is installed, and MXNet will get our store when it is imported."""
    return _prepared and "mxnet" not in sys.modules


def _attach(name: str, module: ModuleType) -> None:
    from geomx_cli.runtime import script

    frontend = frontends.of_module(name)
    assert frontend is not None
    frontend.attach(module, script.session())


class _Finder:
    """Finds the real modules of frameworks, and wraps their loaders in ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        frontend = frontends.of_module(fullname)
        if frontend is None:
            return None
        # If the folder of geomx_cli is on the path, as for a script located there, geomx_cli/mxnet.py is not MXNet.
        places = path or [place for place in sys.path if os.path.realpath(place) != _PACKAGE]
        spec = PathFinder.find_spec(fullname, places, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, frontend)  # type: ignore[assignment]
        return spec


class _Loader:
    """Not an importlib.abc.Loader, because importing that would take longer than everything else here."""

    def __init__(self, loader: Any, frontend: "ScriptFrontend") -> None:
        self._loader = loader
        self._frontend = frontend

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._frontend.prepare_import()
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _attach(module.__name__, module)
