"""Rules on imports beyond the import-linter contracts in setup.cfg, and on the pages of docs/ that code names."""

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from cluster import ROOT
from imports import imports

from geomx_cli.contract import frontends as contract_frontends
from geomx_cli.core import plugins
from geomx_cli.runtime import frontends

PACKAGE = ROOT / "geomx_cli"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """All imports, including those inside functions and for types only."""
    return grimp.build_graph("geomx_cli", include_external_packages=True, cache_dir=None)


def test_no_module_imports_itself_in_a_circle(graph: grimp.ImportGraph) -> None:
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_only_hosts_and_the_inventory_know_how_a_machine_is_reached() -> None:
    kinds = {f"geomx_cli.inventory.{name}" for name in ("Local", "Requested", "Slurm", "Ssh", "values")}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("hosts", "inventory"):
            assert kinds.isdisjoint(imports(path)) and "access.kind" not in path.read_text(), path


PLUGINS = ("runtime/algorithms", "ps/codecs", "ps/delivery")
NAMED = {
    "core/options.py",  # the defaults of --algo and --delivery, and usual options beside a codec
    "contract/settings.py",  # GeoMX's own variables stand for an algorithm and a delivery
    "observe/report/comparison.py",  # the option --dgt
    "observe/report/summary.py", "observe/report/collected.py", "commands/logs.py",  # files of ESync's tools
}  # fmt: skip


def test_only_their_packages_name_plug_ins() -> None:
    """Elsewhere code asks for attributes, so a plug-in from outside gets what a bundled one gets. "local" and "direct"
    are words of more than one meaning.
    """
    names = {name for kind in (plugins.algorithms, plugins.codecs, plugins.deliveries) for name in kind()}
    names -= {"local", "direct", "int8"}
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
        if where not in NAMED and not where.startswith(PLUGINS):
            found = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
            assert not found & names, f"{where} names {found & names}"


FRONTENDS = PACKAGE / "runtime/frontends"
LOADERS = {"import_module", "__import__", "find_spec"}


def frameworks(path: Path) -> set[str]:
    """Frameworks that a file imports, at its top or inside functions, by statement or by a call."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                found |= {name.name.partition(".")[0] for name in names}
            case ast.ImportFrom(module=str(module), level=0):
                found.add(module.partition(".")[0])
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in LOADERS:
                found |= {str(word.value).partition(".")[0] for word in node.args if isinstance(word, ast.Constant)}
    return found & {"mxnet", "torch"}


def test_only_a_front_end_imports_its_framework() -> None:
    for path in PACKAGE.rglob("*.py"):
        own = set(path.relative_to(FRONTENDS).parts[:-1]) if path.is_relative_to(FRONTENDS) else set()
        assert frameworks(path) <= own, f"{path.relative_to(ROOT)} imports {frameworks(path) - own}"
    for name in ("mxnet", "torch"):
        assert frameworks(FRONTENDS / name / "load.py") == {name}, "this is where it is imported"


def test_front_ends_are_found_by_their_names_only() -> None:
    """Code outside a front end imports none of its modules; the public module may."""
    assert {path.parent.name for path in FRONTENDS.glob("*/__init__.py")} == set(contract_frontends.FRONTENDS)
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(FRONTENDS).parts[:-1] if path.is_relative_to(FRONTENDS) else ()
        found = {name.split(".")[3] for name in imports(path) if name.startswith("geomx_cli.runtime.frontends.")}
        allowed = {*inside, *frontends.__all__, "finder"} | ({path.stem} if path.parent == PACKAGE else set())
        assert found <= allowed, f"{path.relative_to(ROOT)} imports {found - allowed}"


@pytest.mark.parametrize("package", ["agent", "probe"])
def test_what_hosts_run_first_needs_the_standard_library_alone(graph: grimp.ImportGraph, package: str) -> None:
    """The probe reports missing modules, and the agent starts in a fraction of their import time."""
    needed = {name.split(".")[0] for name in graph.find_upstream_modules(f"geomx_cli.{package}", as_package=True)}
    assert needed - {"geomx_cli"} <= sys.stdlib_module_names


def test_pages_that_code_and_templates_name_are_there() -> None:
    named = re.compile(r"\bdocs/[\w/-]+\.md")
    folders = (PACKAGE, ROOT / "templates", ROOT / "benchmarks", ROOT / "deploy")
    files = [*(file for folder in folders for file in folder.rglob("*") if file.is_file()), ROOT / "Makefile"]
    texts = {file: file.read_text(errors="ignore") for file in files if "__pycache__" not in file.parts}
    pages = {(file, page) for file, text in texts.items() for page in named.findall(text)}
    assert len(pages) > 10 and [(file, page) for file, page in pages if not (ROOT / page).exists()] == []


NO_FILES_OF_OURS = {"SCRIPT.py", "models.py", "version.py", "train.py"}
"""Of users and of other packages."""


def test_files_that_prose_names_exist() -> None:
    folders = [ROOT / name for name in ("geomx_cli", "benchmarks", "tests", "templates")]
    ours = {path.name for folder in folders for path in folder.rglob("*.py")}
    for path in (*PACKAGE.rglob("*.py"), ROOT / "docs" / "architecture.md"):
        named = set(re.findall(r"\b(\w+\.py)\b", path.read_text()))
        assert named <= ours | NO_FILES_OF_OURS, (path, named - ours - NO_FILES_OF_OURS)
