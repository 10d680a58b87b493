"""Discovery of plug-ins, and the messages for invalid ones."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import OPTIONS, Option

PLUGIN = """
from geomx_cli.core.options import Option

name = {name!r}
options = (Option("{option}", "int", 3, "{env}", "A number.", "synchronisation"),)

def refuses(spec):
    return None

def worker():
    return "a part"
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """An empty package, importable under its folder's name."""
    folder = tmp_path / f"plugins_{abs(hash(request.node.name))}"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return folder


def write(package: Path, module: str, name: str, option: str = "depth", env: str = "GEOMX_DEPTH") -> None:
    (package / f"{module}.py").write_text(PLUGIN.format(name=name, option=option, env=env))


def test_a_new_plugin_is_one_new_file(package: Path) -> None:
    write(package, "zeta", "zeta")
    write(package, "twobit", "2bit", "threshold", "GEOMX_THRESHOLD")
    write(package, "_helper", "helper")
    found = plugins.scan(package.name)
    assert list(found) == ["2bit", "zeta"]
    make = plugins.factory(found["zeta"], "worker")
    assert make is not None
    assert make() == "a part"
    assert plugins.factory(found["zeta"], "server") is None
    merged = plugins.merge(OPTIONS, found.values())
    assert [option.name for option in merged[len(OPTIONS) :]] == ["threshold", "depth"]


def test_two_plugins_with_one_name(package: Path) -> None:
    write(package, "first", "same")
    write(package, "second", "same")
    with pytest.raises(TypeError, match=r"second: there is a plug-in named 'same' already"):
        plugins.scan(package.name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("[]", r"its options are \[\], not a tuple of Option"),
        ("('--depth',)", "its options contain '--depth', which is no Option"),
        ("(Option('depth', 'integer', 3, 'D', '', 'cluster'),)", "its option 'depth' is of kind 'integer'"),
        ("(Option('depth', 'int', 3, 'D', None, 'cluster'),)", "its option 'depth' needs text as name, env and help"),
        ("(Option('depth', 'int', '3', 'D', '', 'cluster'),)", "its option 'depth' of kind int has the default '3'"),
        ("(Option('depth', 'int', True, 'D', '', 'cluster'),)", "its option 'depth' of kind int has the default True"),
    ],
)
def test_options_of_a_wrong_type(package: Path, options: str, message: str) -> None:
    write(package, "odd", "odd")
    with (package / "odd.py").open("a") as module:
        module.write(f"options = {options}\n")
    with pytest.raises(TypeError, match=f"odd: {message}"):
        plugins.scan(package.name)


def test_a_module_that_is_no_plugin(package: Path) -> None:
    (package / "odd.py").write_text("name = 'odd'\n")
    with pytest.raises(TypeError, match="odd is no plug-in: it has no options, refuses"):
        plugins.scan(package.name)


@pytest.mark.parametrize(
    ("name", "env", "claimed"),
    [
        ("workers", "GEOMX_MINE", "--workers"),
        ("mine", "GEOMX_WORKERS", "GEOMX_WORKERS"),
        ("no_workers", "GEOMX_MINE", "--no-workers"),
    ],
)
def test_options_that_collide(name: str, env: str, claimed: str) -> None:
    option = Option(name, "int", 0, env, "", "cluster")
    plugin = SimpleNamespace(__name__="own.mine", name="mine", options=(option,), refuses=lambda spec: None)
    both = rf"of geomx and option '{name}' of the plug-in mine \(own.mine\) both claim {claimed}"
    with pytest.raises(InvalidSettings, match=both):
        plugins.merge(OPTIONS, [plugin])


@pytest.mark.processes
def test_two_plugins_with_one_option_are_both_named(tmp_path: Path) -> None:
    """Entry points of two distributions, in two groups; the command line itself is not to blame."""
    for name, group in (("deep", "algorithms"), ("deeper", "deliveries")):
        write(tmp_path, f"module_of_{name}", name)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[geomx.{group}]\n{name} = module_of_{name}\n")
    argv = [sys.executable, "-m", "geomx_cli", "launch", "--local", "--dry-run"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == InvalidSettings.exit_code
    assert done.stderr.splitlines() == [
        "error: option 'depth' of the plug-in deep (module_of_deep) and option 'depth' of the plug-in deeper"
        " (module_of_deeper) both claim --depth",
        "  rename one of them, or uninstall the plug-in",
    ]


def test_the_table_offers_the_plugins_that_there_are() -> None:
    table = {option.name: option for option in plugins.table()}
    assert table["algo"].choices == tuple(plugins.algorithms())
    assert table["delivery"].choices == tuple(plugins.deliveries())
    assert "fsa" in plugins.algorithms()
    assert "direct" in plugins.deliveries()
    for found in (plugins.algorithms(), plugins.allocators(), plugins.deliveries()):
        assert all(option.name in table for plugin in found.values() for option in plugin.options)


def test_an_unknown_name_lists_the_known_ones() -> None:
    assert plugins.find("delivery", "direct").name == "direct"
    with pytest.raises(InvalidSettings, match="there is no algorithm 'fas'") as caught:
        plugins.find("algorithm", "fas")
    assert "fsa" in caught.value.hint


@pytest.mark.processes
def test_a_scan_imports_nothing_heavy() -> None:
    heavy = ("numpy", "zmq", "msgspec", "mxnet", "torch", "click", "rich", "importlib.metadata")
    code = (
        "import sys; from geomx_cli.core import plugins; plugins.table();"
        f"print(*sorted(set({heavy!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
