"""Planned clusters of every topology, as processes on this machine: final parameters against sums in one process."""

from pathlib import Path

import pytest
from cluster import Cluster
from rounds import PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in, launch_planned

from geomx_cli.core.options import Value, defaults

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


@pytest.mark.parametrize(
    ("shape", "one_host"), [(shape, number % 2 == 0) for number, shape in enumerate(SHAPES)], ids=SHAPES
)
def test_a_planned_cluster_gives_the_same_bits(cluster: Cluster, tmp_path: Path, shape: str, one_host: bool) -> None:
    """Through unix sockets on one host, and by TCP with keys between several."""
    options = {**defaults(), **SHAPES[shape], "slice_elements": 20_000}
    planned = cluster.planned(SCRIPT[1:], options, one_host=one_host)
    launch_planned(cluster, planned)
    cluster.finish()
    found = found_in(tmp_path)
    parties = members(options)
    everybody = [rank for party in parties for rank in party]
    assert sorted(found) == everybody
    assert_equal(found, expected(parties, dict.fromkeys(everybody, PLANNED_ROUNDS), optimizer=True))
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
