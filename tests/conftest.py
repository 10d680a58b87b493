"""Configuration shared by all tests: a separate state folder, one thread per process, and fixtures."""

import atexit
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import hypothesis
import pytest
from cluster import ROOT, Cluster
from desk import Desk
from sshd import Person, Sshd

from geomx_cli.core import plugins
from geomx_cli.hosts import ports
from geomx_cli.ps.aggregation.codec import parse_codec

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="geomx-tests-")  # keep the tests' jobs apart from the user's
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# One thread per computing process: threads that share a core would busy-wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"
# In a background job of a shell, Ctrl-C is ignored, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example's duration depends on the machine's load.
hypothesis.settings.register_profile("any-load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("any-load"), max_examples=25)
hypothesis.settings.load_profile("any-load")

# They have environments of their own.
collect_ignore = [
    folder
    for folder, module in (("pytorch", "torch"), ("frameworks", "transformers"))
    if not importlib.util.find_spec(module)
]

STARTERS = {"browser", "cluster", "machines", "sites", "desk", "workers"}
"""Fixtures whose tests start processes."""
_running: list[pytest.Item] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--no-processes`, used by `make check`."""
    parser.addoption(
        "--no-processes", action="store_true",
        help="leave out tests that start processes or are thorough, and try fewer examples",
    )  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Choose the number of examples before test modules are imported."""
    if config.getoption("--no-processes"):
        hypothesis.settings.load_profile("quick")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, and with --no-processes deselect the marked ones. Slow ones begin first: none runs
    alone at the end, and while they wait others compute.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        if STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    if config.getoption("--no-processes"):
        left_out = {item for item in items if any(map(item.get_closest_marker, ("processes", "thorough")))}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Refuse processes of tests that are not marked, in each run: `make check` would start them too."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Have numba compile all kernels, which it keeps. Otherwise many processes of the first tests do so at the same
    time, and seem stuck to each other.
    """
    is_controller = not hasattr(session.config, "workerinput")
    if is_controller and not session.config.getoption("--no-processes") and importlib.util.find_spec("numba"):
        for spec in ("fp16", "bf16", "int8", "q4", "1bit", "sparseloco"):
            if (codec := parse_codec(spec)) is not None:
                codec.prepare()


def pytest_sessionfinish() -> None:
    """End the port reservations of launches within the test runner."""
    ports.release(range(1 << 16))


def _refuse_processes(event: str, given: tuple[object, ...]) -> None:
    if event not in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system"):
        return
    by_library = given[:1] in (("lscpu",), ("fc-list",))  # numpy, and matplotlib's first import on a machine
    if not by_library and any(item.get_closest_marker("processes") is None for item in _running):
        raise RuntimeError("a test that starts processes has to be marked: pytest.mark.processes")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster in its own directory; remaining processes are killed at the end."""
    made = Cluster(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def person(tmp_path: Path) -> Person:
    """A user with a home, an SSH key and files for ssh_config and known_hosts."""
    return Person(tmp_path / "home")


@pytest.fixture(params=["paramiko", "openssh"])
def client(request: pytest.FixtureRequest, person: Person) -> str:
    """Has the user connect with each of the clients."""
    person.client = request.param
    return str(request.param)


@pytest.fixture
def machines(tmp_path: Path, person: Person) -> Iterator[Callable[..., Sshd]]:
    """Starts an sshd that represents a machine, by name; `machines()` is the one called "alpha"."""
    started: list[Sshd] = []

    def start(name: str = "alpha", **changes: Any) -> Sshd:
        started.append(Sshd(tmp_path / "machines" / name, name, person, **changes))
        return started[-1].start()

    yield start
    for machine in started:
        machine.stop()


@pytest.fixture
def sites(machines: Callable[..., Sshd], person: Person) -> list[Sshd]:
    """Three machines whose host keys are known and whose names are in the user's ssh_config."""
    made = [machines(name) for name in ("alpha", "beta", "gamma")]
    person.knows(*made)
    return made


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A desk whose processes are killed at the end of the test."""
    made = Desk(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="session")
def recovery() -> Any:
    """The benchmark that kills processes."""
    spec = importlib.util.spec_from_file_location("recovery", ROOT / "benchmarks/recovery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["recovery"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plug-ins of tests/plugins are on this process's path too, as if installed by pip."""

    def forget() -> None:
        plugins._all.cache_clear()
        plugins.table.cache_clear()

    monkeypatch.syspath_prepend(Path(__file__).parent / "plugins")
    forget()
    yield
    monkeypatch.undo()
    forget()


@pytest.fixture(scope="module")
def mx() -> Any:
    """MXNet 1.9.1."""
    return forks.import_mxnet()
