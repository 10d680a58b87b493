"""Imports at the start of processes: slow modules are loaded only where they are needed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from geomx_cli.contract import frontends
from geomx_cli.datasets import catalog, sources
from geomx_cli.runtime.data import reader
from geomx_cli.runtime.frontends.mxnet import gluon_networks

PLAN = """
import sys
from geomx_cli.plan import JobSpec, plan
from geomx_cli.hosts.ports import free_ports
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine
from geomx_cli.core import plugins
from geomx_cli.core.options import defaults
values = defaults(plugins.table())
inventory = this_machine(values, free_ports(ports_needed(values)), one_host=True)
plan(inventory, JobSpec(job="x", options=values, script=(), job_dir="/x", socket_dir="/x", python=sys.executable))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "code",
    ["import geomx_cli.runtime.__main__, geomx_cli.ps.cluster.scheduler", PLAN, "import geomx_cli.commands.data"],
    ids=("scheduler", "plan", "data"),
)
def test_it_does_without_numpy_and_frameworks(code: str) -> None:
    check = "import sys\nfound = {'numpy', 'mxnet', 'paramiko'} & set(sys.modules)\nassert not found, found"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr


CONTROL = """
import sys
sys.modules.update(numpy=None, zmq=None)  # their import fails from now on
from geomx_cli.__main__ import main
sys.argv = ["geomx", *sys.argv[1:]]
main()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    ["launch --local --dry-run", "launch --local --dry-run --algo diloco --p3", "jobs", "data --help", "sweep --help"],
)
def test_who_plans_needs_neither_numpy_nor_sockets(words: str, tmp_path: Path) -> None:
    """A machine that only plans, starts and watches jobs may do without what their processes compute with."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", CONTROL, *words.split()], capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_catalog_names_what_there_is() -> None:
    assert set(frontends.networks()) == {"linear", "cnn", "cnn-bn", "gpt", *gluon_networks._ZOO}
    images = {name for name, known in catalog.DATA_SETS.items() if known.shape is not None}
    assert set(catalog.DATA_SETS) == set(sources.SOURCES) and images == set(reader._READERS)
