"""Planned clusters of every topology, as processes on this machine: final parameters against sums in one process."""

import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from cluster import ROOT, Cluster
from rounds import assert_equal, expected, found_in

from geomx_cli.core.options import Value, defaults
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.ports import free_ports, ports_needed
from geomx_cli.plan.this_machine import this_machine
from geomx_cli.ps.net import security

SCRIPT = ("python", str(ROOT / "tests/scripts/rounds.py"))
ROUNDS = 4
SHAPES: dict[str, dict[str, Value]] = {
    "central, 2 global servers": {"global_servers": 2},
    "central, 3 global servers, 2 local servers": {"global_servers": 3, "local_servers": 2},
    "central, central workers": {"central_workers": 2},
    "3 parties of 1 worker": {"parties": 3, "workers": 1},
    "spread, 1 global server each": {"topology": "spread"},
    "spread, 2 global servers each": {"topology": "spread", "global_servers": 2},
    "spread, central workers": {"topology": "spread", "workers": 1, "central_workers": 2},
    "flat, 2 servers": {"topology": "flat", "global_servers": 2},
}


@pytest.fixture
def socket_dir() -> Iterator[str]:
    """A short directory: the path of a unix socket is limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gx-") as path:
        yield path


@pytest.mark.parametrize(
    ("shape", "one_host"), [(shape, number % 2 == 0) for number, shape in enumerate(SHAPES)], ids=SHAPES
)
def test_a_planned_cluster_gives_the_same_bits(
    cluster: Cluster, tmp_path: Path, socket_dir: str, shape: str, one_host: bool
) -> None:
    """Through unix sockets on one host, and by TCP with keys between several."""
    options = {**defaults(), **SHAPES[shape], "slice_elements": 20_000}
    inventory = this_machine(options, free_ports(ports_needed(options)), one_host=one_host, python=sys.executable)
    spec = JobSpec(
        job="topologies",
        options=options,
        script=SCRIPT,
        job_dir=str(tmp_path),
        socket_dir=socket_dir,
        key_dir="" if one_host else str(tmp_path),
    )
    planned = plan(inventory, spec)
    start(cluster, planned, tmp_path)
    cluster.finish()
    found = found_in(tmp_path)
    parties = members(options)
    everybody = [rank for party in parties for rank in party]
    assert sorted(found) == everybody
    assert_equal(found, expected(parties, dict.fromkeys(everybody, ROUNDS), optimizer=True))
    assert any("tcp://" in process.env.get("GEOMX_BIND", "") for process in planned.processes) != one_host


def members(options: dict[str, Value]) -> list[list[int]]:
    """Global ranks in the order of the sums: party by party, then central workers, separately or as a party."""
    count, each, central = (int(options[name]) for name in ("parties", "workers", "central_workers"))
    if options["topology"] == "flat":
        return [list(range(count * each))]
    parties = [list(range(index * each, (index + 1) * each)) for index in range(count)]
    if options["topology"] == "spread" and central:
        return [*parties, list(range(count * each, count * each + central))]
    return parties + [[count * each + index] for index in range(central)]


def start(
    cluster: Cluster, planned: Plan, directory: Path, argv: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Start the plan's processes, with keys if it has several hosts; `argv` replaces commands, by process file name."""
    if planned.spec.key_dir:
        callers = {process.name: planned.callers.get(process.name) for process in planned.processes}
        for process in planned.processes:
            path = directory / f"{process.file_name}.key"
            path.touch(0o600)
        for name, content in security.generate(planned.job, callers).items():
            (directory / f"{planned.process(name).file_name}.key").write_bytes(content)
    cluster.environment = {
        "OUT": str(directory / "w{rank}.npz"),
        "ROUNDS": str(ROUNDS),
        "SHUFFLE": "7",
        "SERVER_OPTIMIZER": "1",
    }
    for process in planned.processes:
        env = dict(process.env)
        env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}"
        cluster.start(process.file_name, (argv or {}).get(process.file_name, process.argv), env)

