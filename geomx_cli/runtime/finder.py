"""Prepares MXNet when a script first imports it. Loaded before every script, so it imports next to nothing."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["install"]


def install() -> None:
    """From now on `import mxnet` gives MXNet with our store in it. Doing it twice is the same as once."""
    if "mxnet" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds the real MXNet, once, and puts our loader before its own."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "mxnet":
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    """Not an importlib.abc.Loader: importing that takes longer than everything else here."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        from geomx_cli.runtime import mxnet_store, script

        mxnet_store.prepare_import()
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        script.session().attach(module)
