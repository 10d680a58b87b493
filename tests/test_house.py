"""The house: imports run one way, from the command line down to what is beneath everything."""

import ast
from collections.abc import Iterator
from pathlib import Path

from cluster import ROOT

from geomx_cli.runtime import frontends

PACKAGE = ROOT / "geomx_cli"
BENEATH = {"core"}
ABOVE = (
    "__main__", "cli", "commands", "observe", "jobs", "preflight", "plan", "mxnet", "runtime", "hosts", "inventory",
    "ps",
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


FRONTENDS = PACKAGE / "runtime/frontends"
LOADERS = {"import_module", "__import__", "find_spec"}


def frameworks(path: Path) -> set[str]:
    """Frameworks that a file imports, at its head or inside functions, by statement or by a call."""
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
    assert frameworks(FRONTENDS / "mxnet/load.py") == {"mxnet"}, "this is where it is imported"


def test_front_ends_are_found_by_their_names_only() -> None:
    """What is not in one of them imports none of their modules; what users import may."""
    assert {path.parent.name for path in FRONTENDS.glob("*/__init__.py")} == set(frontends.NAMES)
    for path in PACKAGE.rglob("*.py"):
        inside = path.relative_to(FRONTENDS).parts[:-1] if path.is_relative_to(FRONTENDS) else ()
        found = {name.split(".")[3] for name in imports(path) if name.startswith("geomx_cli.runtime.frontends.")}
        allowed = {*inside, *frontends.__all__} | ({path.stem} if path.parent == PACKAGE else set())
        assert found <= allowed, f"{path.relative_to(ROOT)} imports {found - allowed}"
