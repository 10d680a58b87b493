"""What import-linter's contracts in setup.cfg do not say of the way that imports run."""

import sys
from graphlib import TopologicalSorter

import grimp
import pytest


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Who imports whom, also inside functions and for types alone."""
    return grimp.build_graph("geomx_cli", include_external_packages=True, cache_dir=None)


def test_no_module_imports_itself_in_a_circle(graph: grimp.ImportGraph) -> None:
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    imports["geomx_cli.hosts"] -= graph.find_children("geomx_cli.hosts")  # it opens hosts, and has what they all need
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


@pytest.mark.parametrize("package", ["agent", "probe"])
def test_what_hosts_run_first_needs_the_standard_library_alone(graph: grimp.ImportGraph, package: str) -> None:
    """The probe tells which modules are missing, and the agent starts in a fraction of their time."""
    needed = {name.split(".")[0] for name in graph.find_upstream_modules(f"geomx_cli.{package}", as_package=True)}
    assert needed - {"geomx_cli"} <= sys.stdlib_module_names
