"""Chooses which workers a script's ranks count: those of all parties, unless an MXNet script uses names that GeoMX adds
to its KVStore.

See script_sources.py for what is read of it.
"""

import ast
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from geomx_cli.contract.frontends import FRONTENDS
from geomx_cli.core import plugins
from geomx_cli.inventory import Inventory, RankScope
from geomx_cli.jobs.store.script_sources import Source, sources_of

__all__ = ["Choice", "choose"]

_OWN = frozenset(("num_all_workers", "is_master_worker", "global_rank", "esync_client"))
_COMMON = frozenset(("party", "versions"))
"""Names that are common on other objects: they count only on a store."""
_STORES = frozenset(("kv", "kvstore", "store"))
_PACKAGE = "geomx_cli"


@dataclass(frozen=True)
class Choice:
    """`why`: a clause for messages; "" if there was nothing to choose. `free`: the other scope is possible too.
    framework: that of the script, as --framework; "" if nothing tells.
    """

    scope: RankScope
    why: str = ""
    free: bool = True
    framework: str = ""

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
    framework = _framework(script, inventory)
    if framework not in ("", "mxnet"):
        return Choice("party" if asked == "party" else "global", framework=framework)
    return replace(_choose(asked, script, algorithm, inventory), framework=framework)


def _choose(asked: str, script: Sequence[str], algorithm: str, inventory: Inventory) -> Choice:
    """As `choose`, for a script of MXNet, or of which nothing is known."""
    match asked:
        case "global" | "party":
            return Choice(asked)
    if inventory.topology == "flat" or not script:
        return Choice("party")
    if plugins.algorithms()[algorithm].ranks_by_party:
        return Choice("party", f"scripts for {algorithm} divide by the workers of their party", free=False)
    found = sources_of(script, inventory)
    if isinstance(found, str):
        return Choice("party", f"{found}, so it may use GeoMX's names")
    use = _first_use(found)
    if use is None:
        return Choice("global", f"{found[0].path.name} uses no GeoMX names")
    return Choice("party", use)


def _first_use(sources: Iterable[Source]) -> str | None:
    """Describe the first use of a GeoMX name, as in "models.py uses global_rank"; None if there is none."""
    for source in sources:
        tree = source.tree
        names = frozenset(_names(tree)) if tree is not None else _OWN.intersection(re.findall(r"\w+", source.text))
        if names:
            return f"{source.name} uses {min(names)}"
    return None


def _framework(script: Sequence[str], inventory: Inventory) -> str:
    """Return the framework whose API of geomx a script imports, or else the framework that it imports, MXNet if both;
    "" for neither.
    """
    if not script or isinstance(sources := sources_of(script, inventory), str):
        return ""
    imported = {name for source in sources if source.tree is not None for name in _imported_names(source.tree)}
    others = (name for name in FRONTENDS if name != "mxnet" and f"{_PACKAGE}.{name}" in imported)
    packages = {name.partition(".")[0] for name in imported}
    mxnet = "mxnet" if imported & {"mxnet", f"{_PACKAGE}.mxnet"} else ""
    return next(others, mxnet or ("torch" if "torch" in packages else ""))


def _imported_names(tree: ast.AST) -> Iterator[str]:
    """Yield the modules that a module may import, and the names that it imports from them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{item.name}" for item in node.names)


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
