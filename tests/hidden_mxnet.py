"""MXNet, imported beforehand but hidden: an `import mxnet` finds no module, goes through geomx's import hook as in any
process, and executes nothing, a tenth of its CPU time.
"""

import sys
import warnings
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import numpy

from geomx_cli.runtime.frontends.mxnet.load import load_mxnet

__all__ = ["load"]


class _Imported:
    """The loader of a package whose `modules` are executed already."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self._modules = modules

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        sys.modules.update(self._modules)


def load() -> None:
    """Import MXNet as geomx does, and undo what a process can see of that."""
    before, find = _names(), PathFinder.find_spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = load_mxnet().__file__
    for name in _names() - before:
        delattr(numpy, name)
    modules = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "mxnet"}

    def find_spec(name: str, *where: Any) -> ModuleSpec | None:
        spec = find(name, *where)
        if spec is not None and spec.origin == package:
            spec.loader = _Imported(modules)
        return spec

    PathFinder.find_spec = find_spec


def _names() -> set[str]:
    """The names in numpy, but for submodules."""
    return {name for name, value in vars(numpy).items() if not isinstance(value, ModuleType)}
