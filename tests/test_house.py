"""The house: imports run one way, from the command line down to what is beneath everything."""

import ast
from collections.abc import Iterator
from pathlib import Path

from cluster import ROOT

PACKAGE = ROOT / "geomx_cli"
BENEATH = {"core"}
ABOVE = (
    "__main__", "cli", "commands", "observe", "jobs", "preflight", "plan", "runtime", "hosts",
    "inventory", "ps",
)  # fmt: skip
SERVER = ("", "aggregation", "optim", "cluster", "net")
"""The packages of `ps`, from above; "" is what lies in `ps` itself, with `delivery`."""
ELSEWHERE = {"agent", "probe"}  # they run on other machines; those here know their words


def unit(module: str) -> str:
    """The part of the house that a module belongs to."""
    return [*module.split("."), ""][1]


def imports(path: Path) -> Iterator[str]:
    """Modules of geomx that a file imports, at its head or inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "geomx_cli":
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("geomx_cli."))


def test_every_module_has_a_place() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__"} == BENEATH | set(ABOVE) | ELSEWHERE


def test_imports_run_one_way() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        own = unit("geomx_cli." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if own == "__init__":
            continue
        allowed = BENEATH if own in BENEATH | ELSEWHERE else BENEATH | ELSEWHERE | set(ABOVE[ABOVE.index(own) :])
        names = {unit(name) for name in imports(path)} & (BENEATH | ELSEWHERE | set(ABOVE))
        wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in names - allowed - {own}]
    assert not wrong


def test_imports_run_one_way_in_the_parameter_server_too() -> None:
    wrong = []
    for path in (PACKAGE / "ps").rglob("*.py"):
        folder = path.relative_to(PACKAGE / "ps").parts[0]
        own = folder if folder in SERVER else ""
        for name in imports(path):
            _, part, inner, *_ = [*name.split("."), "", ""]
            inner = inner if inner in SERVER else ""
            if part == "ps" and SERVER.index(inner) < SERVER.index(own):
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_only_hosts_and_the_inventory_know_how_a_machine_is_reached() -> None:
    kinds = {"geomx_cli.inventory.Local", "geomx_cli.inventory.Ssh", "geomx_cli.inventory.access"}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] not in ("hosts", "inventory"):
            assert kinds.isdisjoint(imports(path)) and "access.kind" not in path.read_text(), path


def test_what_runs_elsewhere_and_the_servers_need_no_framework() -> None:
    for part in ("agent", "probe", "ps"):
        for path in (PACKAGE / part).rglob("*.py"):
            assert "mxnet" not in "".join(imports(path)) and "import mxnet" not in path.read_text(), path
