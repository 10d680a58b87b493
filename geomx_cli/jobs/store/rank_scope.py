"""Chooses which workers a script's ranks count, by whether it uses names that GeoMX adds to MXNet's KVStore.

The script and its imports from its own folder are parsed, never executed.
"""

import ast
import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from geomx_cli.core import plugins
from geomx_cli.inventory import Inventory, RankScope
from geomx_cli.jobs.store.script import python_file

__all__ = ["Choice", "choose"]

_OWN = frozenset(("num_all_workers", "is_master_worker", "global_rank", "esync_client"))
_COMMON = frozenset(("party", "versions"))
"""Names that are common on other objects: they count only on a store."""
_STORES = frozenset(("kv", "kvstore", "store"))
_PACKAGE = "geomx_cli"
_MOST_FILES, _MOST_BYTES = 200, 1 << 20


@dataclass(frozen=True)
class Choice:
    """`why`: a clause for messages; "" if there was nothing to choose. `free`: the other scope is possible too."""

    scope: RankScope
    why: str = ""
    free: bool = True

    @property
    def sentence(self) -> str:
        """The sentence that launch prints; "" for none."""
        if not self.why:
            return ""
        if self.scope == "global":
            other = "--rank-scope party for kv.rank within each party, beside a master worker"
        else:
            other = "--rank-scope global for kv.rank over the workers of all parties"
        return f"rank scope: {self.scope} ({self.why})" + (f"; {other}" if self.free else "")


def choose(asked: str, script: Sequence[str], algorithm: str, inventory: Inventory) -> Choice:
    """Choose the rank scope of a job; `asked`: "auto", "global" or "party"."""
    match asked:
        case "global" | "party":
            return Choice(asked)
    if inventory.topology == "flat" or not script:
        return Choice("party")
    if plugins.algorithms()[algorithm].ranks_by_party:
        return Choice("party", f"scripts for {algorithm} divide by the workers of their party", free=False)
    word, module = _python_code(script)
    base = _folder(word, inventory)
    if base is None or not (base / word).is_file():
        what = f"{word} cannot be read here" if word else f"{script[0]} is no Python file"
        return Choice("party", f"{what}, so it may use GeoMX's names")
    path = base / word
    found = _first_use(path, base if module else path.parent)
    if found is None:
        return Choice("global", f"{path.name} uses no GeoMX names")
    return Choice("party", found)


def _python_code(script: Sequence[str]) -> tuple[str, bool]:
    """Return the Python file that a command runs ("" if unknown), and whether it is given as a module (-m)."""
    if script[1:2] == ("-m",) and len(script) > 2 and script[0].rpartition("/")[2].startswith("python"):
        return script[2].replace(".", "/") + ".py", True
    return python_file(script) or next((word for word in script if word.endswith(".py")), ""), False


def _folder(word: str, inventory: Inventory) -> Path | None:
    """The job's working directory here, or on a host that copies its files from here; None if neither exists."""
    if not word:
        return None
    for host in inventory.hosts:
        if host.shares_files or not host.workdir:
            return Path(host.workdir or Path.cwd())
    return Path("/") if Path(word).is_absolute() else None


def _first_use(script: Path, folder: Path) -> str | None:
    """Describe the first use of a GeoMX name, as in "models.py uses global_rank"; None if there is none."""
    waiting, seen = [script], {script}
    while waiting:
        path = waiting.pop(0)
        text = _text(path)
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # another Python version, or not Python
            names = _OWN.intersection(re.findall(r"\w+", text))
            imported: list[Path] = []
        else:
            names = frozenset(_names(tree))
            imported = list(_imported(tree, path, folder))
        if names:
            return f"{path.relative_to(folder)} uses {min(names)}"
        for other in imported:
            if other not in seen and len(seen) < _MOST_FILES:
                seen.add(other)
                waiting.append(other)
    return None


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _names(tree: ast.AST) -> Iterator[str]:
    """Yield the GeoMX names in a module: attributes, strings (for getattr), imports of our package."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) if name in _OWN:
                yield name
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name) if name in _COMMON:
                if owner.strip("_") in _STORES:
                    yield f"{owner}.{name}"
            case ast.Constant(value=str(name)) if name in _OWN:
                yield name
            case ast.Import(names=names) if any(item.name.partition(".")[0] == _PACKAGE for item in names):
                if not _only_reports(tree, {item.asname for item in names}):
                    yield _PACKAGE
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.partition(".")[0] == _PACKAGE:
                given = {item.asname or item.name for item in names}
                if {item.name for item in names} != {"report"} and not _only_reports(tree, given):
                    yield _PACKAGE


def _only_reports(tree: ast.AST, modules: Container[str | None]) -> bool:
    """Whether of the imported `modules`, by their names in the script, only `report` is used, which knows no ranks."""
    nodes = list(ast.walk(tree))
    uses = sum(isinstance(node, ast.Name) and node.id in modules for node in nodes)
    reports = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
    ]
    return uses == len(reports) > 0 and {node.attr for node in reports} == {"report"}


def _imported(tree: ast.AST, path: Path, folder: Path) -> Iterator[Path]:
    """Yield the files in `folder` that the module at `path` imports, as far as static analysis tells."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                yield from _files(folder, item.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = path.parents[node.level - 1] if 0 < node.level <= len(path.parents) else folder
            parts = node.module.split(".") if node.module else []
            if base == folder or folder in base.parents:
                yield from _files(base, parts)
                for item in node.names:  # an imported name may be a module
                    yield from _files(base, [*parts, item.name])


def _files(base: Path, parts: Sequence[str]) -> Iterator[Path]:
    """Yield the files executed by importing `parts`: the module and each package's __init__.py."""
    place = base
    for part in parts:
        place = place / part
        for path in (place.with_name(f"{part}.py"), place / "__init__.py"):
            if os.path.isfile(path):  # noqa: PTH113
                yield path
        if not os.path.isdir(place):  # noqa: PTH112  # a name may be longer than Path allows
            return
