"""Checks before the start whether the modules of a user's own network and data set are there, with their functions."""

import ast
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.nearest import did_you_mean
from geomx_cli.core.options import Value
from geomx_cli.inventory import Host, Inventory
from geomx_cli.runtime.training.catalog import is_own

__all__ = ["check_user_modules"]


def check_user_modules(options: Mapping[str, Value], inventory: Inventory) -> None:
    """Raises InvalidSettings if a host that shares this machine's files has no module of --network or --data
    MODULE:FUNCTION, or one in the current folder has no such function. The module is not imported; what another machine
    or Python has is not checked.
    """
    own = {f"--{name}": str(options[name]) for name in ("network", "data") if is_own(str(options[name]))}
    for host in inventory.hosts:
        if host.shares_files and host.python in ("", sys.executable):
            for option, value in own.items():
                _check(option, value, host)


def _check(option: str, value: str, host: Host) -> None:
    module = value.partition(":")[0]
    top, folder = module.partition(".")[0], Path(host.workdir or Path.cwd())
    places = [str(folder), *host.env.get("PYTHONPATH", "").split(":")]
    # sys.meta_path too, which util.find_spec asks: it has the finders of packages installed with pip install -e
    if PathFinder.find_spec(top, places) is None and top not in sys.modules and find_spec(top) is None:
        close = did_you_mean(top, (near.stem for near in folder.glob("*.py")))
        hint = close or f"correct its name, or start from the folder of {top}.py"
        raise InvalidSettings(f"{option} {value}: there is no module {module!r} in {folder}", hint)
    source = folder / f"{module.replace('.', '/')}.py"
    if source.is_file():
        _check_function(option, value, source)


def _check_function(option: str, value: str, source: Path) -> None:
    try:
        tree = ast.parse(source.read_bytes())
    except (SyntaxError, ValueError, OSError) as error:
        raise InvalidSettings(f"{option} {value}: {source} cannot be read: {error}", "correct it") from None
    names = {name for node in ast.walk(tree) for name in _defined(node)}
    function = value.partition(":")[2]
    if function not in names and "*" not in names:
        module = value.partition(":")[0]
        hint = did_you_mean(function, names) or "correct the name"
        raise InvalidSettings(f"{option} {value}: {module} has no function {function!r}", hint)


def _defined(node: ast.AST) -> list[str]:
    """The names that a statement may give to a module; "*" for names that are not known."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return ["*"] if name == "__getattr__" else [name]
        case ast.Name(id=name, ctx=ast.Store()):
            return [name]
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return [alias.asname or alias.name for alias in aliases]
        case ast.Call(func=ast.Name(id="globals" | "setattr" | "exec")):
            return ["*"]
    return []
