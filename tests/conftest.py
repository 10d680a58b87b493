"""What all tests share: a state folder of their own, one thread for each process, and fixtures."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from cluster import Cluster
from desk import Desk
from sshd import Person, Sshd

os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="geomx-tests-")  # jobs of tests are not the person's own
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# One thread for each process that computes: those that share a core wait for one another by spinning.
os.environ["OMP_NUM_THREADS"] = "1"
# Who starts the tests in the background of a shell has them ignore Ctrl-C, and so whatever they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says how loaded the machine is.
hypothesis.settings.register_profile("any-load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("any-load")

STARTERS = {"cluster", "machines", "sites", "jobs", "desk"}
"""Fixtures whose tests start processes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--no-processes` is what `make check` runs."""
    parser.addoption("--no-processes", action="store_true", help="leave out tests that start processes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their fixtures, and with --no-processes leave out those that are marked."""
    for item in items:
        if STARTERS.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("processes")
    if config.getoption("--no-processes"):
        left_out = [item for item in items if item.get_closest_marker("processes")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("processes")]
        sys.addaudithook(_refuse_processes)


def _refuse_processes(event: str, given: tuple[object, ...]) -> None:
    by_numpy = given[:1] == ("lscpu",)
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system") and not by_numpy:
        raise RuntimeError("a test that starts processes has to be marked: pytest.mark.processes")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster in a directory of its own; whatever still runs at the end is killed."""
    made = Cluster(tmp_path)
    yield made
    made.stop()


@pytest.fixture
def person(tmp_path: Path) -> Person:
    """Somebody with a home, an SSH key and files for ssh_config and known_hosts."""
    return Person(tmp_path / "home")


@pytest.fixture
def machines(tmp_path: Path, person: Person) -> Iterator[Callable[..., Sshd]]:
    """Starts an sshd that stands for a machine, by its name; `machines()` is the one called "alpha"."""
    started: list[Sshd] = []

    def start(name: str = "alpha", **changes: Any) -> Sshd:
        started.append(Sshd(tmp_path / "machines" / name, name, person, **changes))
        return started[-1].start()

    yield start
    for machine in started:
        machine.stop()


@pytest.fixture
def sites(machines: Callable[..., Sshd], person: Person) -> list[Sshd]:
    """Three machines whose host keys are known and whose names are in the person's ssh_config."""
    made = [machines(name) for name in ("alpha", "beta", "gamma")]
    person.knows(*made)
    return made


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    """A desk; what was started at it is ended with the test."""
    made = Desk(tmp_path)
    yield made
    made.close()
