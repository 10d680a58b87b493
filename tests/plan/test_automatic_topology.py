"""The topology that geomx chooses: spread where several parties train and reach each other, else central."""

from typing import Any

import pytest

from geomx_cli.core.options import defaults
from geomx_cli.core.plugins import table
from geomx_cli.inventory import Inventory, validated
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.automatic_topology import in_central, topology_line, with_topology
from geomx_cli.plan.ports import choose
from geomx_cli.plan.this_machine import this_machine

SPEC = JobSpec(job="j", job_dir="/j", socket_dir="/s")


def of_hosts(workers: int = 0, **changes: dict[str, Any]) -> Inventory:
    """A central party, hub, with `workers`, and parties A and B, each with a machine, changed by the party's name."""
    sizes = {"hub": workers, "A": 1, "B": 1}
    hosts = [
        {
            "name": party.lower(), "parties": [party], "address": f"10.0.0.{number}", "devices": ["cpu"] * size,
            "access": {"kind": "ssh", "address": party}, "ports": [9000, 9001, 9002, 9003], **changes.get(party, {}),
        }
        for number, (party, size) in enumerate(sizes.items(), 1)
    ]  # fmt: skip
    parties = [{"name": name, "workers": 1} for name in ("A", "B")]
    central = {"name": "hub", "workers": workers}
    return validated({"parties": parties, "central": central, "hosts": hosts, "topology_is_automatic": True})


@pytest.mark.parametrize(
    ("inventory", "said"),
    [
        (of_hosts(), "spread: 2 parties train and their hosts reach each other"),
        (of_hosts(1), "spread: 3 parties train and their hosts reach each other"),
        (of_hosts(B={"reachable_from": ["hub"]}), "central: not all parties reach host b"),
        (of_hosts(B={"runs": ["scheduler", "server"]}), "central: host b: no host of party B runs its global_server"),
        (of_hosts(B={"ports": [9000]}), "central: host b needs 2 ports for its schedulers and servers"),
    ],
    ids=["apart", "central-trains", "unreachable", "roles", "ports"],
)
def test_the_inventory_decides(inventory: Inventory, said: str) -> None:
    found = with_topology(inventory)
    assert topology_line(found).startswith(f"topology {said}")
    planned = plan(choose(found, None), SPEC)
    assert (planned.topology, planned.spec.options["topology"]) == (found.topology, found.topology)
    assert planned.to_json()["topology_reason"] == found.topology_reason


def test_what_the_user_chose_stays_and_has_no_reason() -> None:
    for topology in ("central", "spread"):
        given = this_machine({**defaults(table()), "topology": topology}, range(9000, 9040))
        assert with_topology(given) == given
        assert topology_line(given) == f"topology {topology}"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "topology spread: 2 parties train, all on this machine"),
        ({"parties": 1}, "topology central: only A trains"),
        ({"parties": 1, "central_workers": 1}, "topology spread: 2 parties train, all on this machine"),
    ],
)
def test_on_this_machine(options: dict[str, Any], said: str) -> None:
    values = {**defaults(table()), **options}
    assert values["topology"] == "auto"
    assert topology_line(with_topology(this_machine(values, range(9000, 9040)))) == said


def test_the_choice_is_made_anew_after_a_change_and_can_be_taken_back() -> None:
    central = in_central(with_topology(of_hosts()), "no connection a -> b")
    assert topology_line(central) == "topology central: no connection a -> b"
    assert with_topology(central).topology == "spread"
