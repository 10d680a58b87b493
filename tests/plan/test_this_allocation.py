"""The nodes of an allocation as parties."""

from collections.abc import Mapping, Sequence

import pytest
from msgspec import structs

from geomx_cli.core import plugins
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.options import Value, defaults
from geomx_cli.hosts.allocation import Present
from geomx_cli.inventory import Inventory, Local, Slurm
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.ports import choose
from geomx_cli.plan.this_allocation import described, this_allocation

GPUS, CPU = ("gpu0", "gpu1"), ("cpu",)


def present(devices: Sequence[str], nodes: int = 4) -> Present:
    return Present("slurm", 7, "Slurm job 7", f"n[1-{nodes}]", {f"n{number + 1}": devices for number in range(nodes)})


def inventory(given: Present, **written: Value) -> Inventory:
    return this_allocation(given, defaults(plugins.table()), written)


@pytest.mark.parametrize(
    ("devices", "written", "parties"),
    [
        (CPU, {}, {"A": {"n1": 1, "n2": 1, "n3": 1, "n4": 1}}),
        (GPUS, {}, {"A": {"n1": 2, "n2": 2, "n3": 2, "n4": 2}}),
        (GPUS, {"parties": 2}, {"A": {"n1": 2, "n2": 2}, "B": {"n3": 2, "n4": 2}}),
        (GPUS, {"parties": 3, "workers": 2}, {"A": {"n1": 2}, "B": {"n2": 2}, "C": {"n3": 1, "n4": 1}}),
        (CPU, {"workers": 6}, {"A": {"n1": 2, "n2": 2, "n3": 1, "n4": 1}}),
        (CPU, {"workers": 2}, {"A": {"n1": 1, "n2": 1, "n3": 0, "n4": 0}}),
    ],
)
def test_nodes_and_workers(
    devices: Sequence[str], written: Mapping[str, Value], parties: Mapping[str, Mapping[str, int]]
) -> None:
    found = inventory(present(devices), **written)
    given = {
        party.name: {host.name: len(host.devices) for host in found.hosts_of(party.name)} for party in found.parties
    }
    assert given == parties
    assert {party.name: party.workers for party in found.parties} == {
        name: sum(nodes.values()) for name, nodes in parties.items()
    }
    assert [host.access.address for host in found.hosts_of("central")] == ["n1"], "beside the first node's workers"
    planned = plan(choose(found, None), JobSpec(job="j", job_dir="/j", socket_dir="/s"))
    assert not planned.here


def test_it_is_described_with_what_changes_it() -> None:
    given = present(GPUS)
    assert described(given, inventory(given, parties=2)) == (
        "Slurm job 7: 4 nodes (n[1-4]); party A has 2 nodes and 4 workers, B has 2 nodes and 4 workers; "
        "--parties and --workers change this"
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"parties": 5}, "--parties 5, and Slurm job 7 has 4 nodes"),
        ({"parties": 4, "workers": 3}, "--workers 3, and the nodes of party A have 2 GPUs"),
    ],
)
def test_what_does_not_fit(written: Mapping[str, Value], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        inventory(present(GPUS), **written)


def test_a_job_that_goes_on_has_the_nodes_of_the_next_allocation() -> None:
    before = inventory(present(CPU, 2))
    with pytest.raises(InvalidSettings, match="has run on the 2 nodes of an allocation, and here there are 1"):
        given(before).requested_again(8, ["m1"])
    after = given(before).requested_again(8, ["m1", "m2", "m3"])
    assert [host.access.address for host in after.hosts] == ["m1", "m1", "m2"]
    assert [request.job for request in after.requests] == [8]
    assert not any(host.address for host in after.hosts)


def given(asked: Inventory) -> Inventory:
    """The inventory with machines, as an allocator gives them."""
    return asked.with_hosts(
        structs.replace(
            host, address="10.0.0.1", access=Slurm("10.0.0.1", login=Local(), job=7, node=host.access.address)
        )
        for host in asked.hosts
    )
