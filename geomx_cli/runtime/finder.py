"""Hooks the first import of a framework. Loaded before every script, so it imports almost nothing."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

from geomx_cli.runtime import frontends

if TYPE_CHECKING:
    from geomx_cli.runtime.frontends import ScriptFrontend

__all__ = ["install", "installed"]

_PACKAGE = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))  # noqa: PTH120


def install() -> None:
    """Install the import hook: imported frameworks get our store. Idempotent."""
    if not frontends.loaded() and not installed():
        sys.meta_path.insert(0, _Finder())


def installed() -> bool:
    """Return whether the hook is installed and no framework has been imported since."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


class _Finder:
    """Finds the real framework, once, and wraps its loader in ours."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        frontend = frontends.of_framework(fullname)
        if frontend is None:
            return None
        sys.meta_path.remove(self)
        # If our own folder is on the path, as for a script located there, geomx_cli/mxnet.py is not MXNet.
        places = [place for place in sys.path if os.path.realpath(place) != _PACKAGE]
        spec = PathFinder.find_spec(fullname, places, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, frontend)  # type: ignore[assignment]
        return spec


class _Loader:
    """Not an importlib.abc.Loader: importing that would take longer than everything else here."""

    def __init__(self, loader: Any, frontend: "ScriptFrontend") -> None:
        self._loader = loader
        self._frontend = frontend

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        from geomx_cli.runtime import script

        self._frontend.prepare_import()
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        script.session().attach(module, self._frontend)
