"""`--reduce torch` in plans: one worker of each party is a member of its plane, and the others dial it."""

import re
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from geomx_cli.contract.settings import Settings
from geomx_cli.core import options
from geomx_cli.core.errors import InvalidSettings
from geomx_cli.core.plugins import table
from geomx_cli.inventory import Inventory, validated
from geomx_cli.plan import JobSpec, Plan, Process, plan
from geomx_cli.plan.automatic_topology import preview
from geomx_cli.plan.ports import choose, ports_needed
from geomx_cli.plan.this_machine import this_machine

SPEC = JobSpec(
    job="j1", job_dir="/jobs/j1", socket_dir="/s", key_dir="/k", python="/py", script=("python", "train.py")
)


def make(*, spec: JobSpec = SPEC, **given: options.Value) -> Plan:
    """A job on this machine."""
    values = options.defaults(table()) | {"reduce": "torch", "rank_scope": "global"} | given
    ports = range(20001, 20001 + ports_needed(values))
    return plan(this_machine(values, ports), replace(spec, options=values))


def two_hosts() -> Inventory:
    """Party A has 2 hosts with 2 workers and 1, B one with 1."""
    hosts: list[dict[str, Any]] = [
        {"name": "hub", "parties": ("hub",), "address": "10.9.0.1", "ports": (9100, 9101, 9102)},
        {"name": "a1", "parties": ("A",), "address": "10.0.0.1", "devices": ("gpu0", "gpu1")},
        {"name": "a2", "parties": ("A",), "address": "10.0.0.2", "devices": ("cpu",)},
        {"name": "b1", "parties": ("B",), "address": "10.0.1.1", "devices": ("cpu",)},
    ]
    for host in hosts:
        host |= {"ports": tuple(range(9100, 9106)), "access": {"kind": "ssh", "address": host["address"]}}
    parties = [{"name": "A", "workers": 3}, {"name": "B", "workers": 1}]
    central = {"name": "hub", "workers": 0}
    return validated(
        {"parties": parties, "central": central, "hosts": hosts, "rank_scope": "global", "reduce": "torch"}
    )


def workers(planned: Plan) -> dict[str, Process]:
    return {process.name: process for process in planned.processes if process.role == "worker"}


def settings(process: Process) -> Settings:
    return Settings.from_environment(table(), process.env)


def test_only_leaders_are_members() -> None:
    planned = make()
    found = workers(planned)
    assert list(found) == ["A/worker:0", "A/worker:1", "B/worker:0", "B/worker:1"]
    assert [process.global_rank for process in found.values()] == [0, 1, 2, 3]
    for name, process in found.items():
        own = settings(process)
        assert (own.group_size, own.rank, own.num_all_workers) == (2, int(name[-1]), 4)
        assert (own.local is None) == name.endswith("1")
        if own.local is not None:
            assert own.local.workers == 1 and process.endpoints[0].purpose == "group"
        assert process.env["RANK"] == str(process.global_rank) and process.env["WORLD_SIZE"] == "4"
    assert ("A/worker:1", "A/worker:0") in planned.links and ("B/worker:1", "B/worker:0") in planned.links
    assert not any("worker:1" in name for callers in planned.callers.values() for name in callers)
    assert "A/worker:0" not in planned.callers


def test_a_worker_of_each_shard_is_a_member() -> None:
    planned = make(shards=2, workers=4)
    found = {name: settings(process) for name, process in workers(planned).items()}
    assert [name for name, own in found.items() if own.local] == [
        f"{party}/worker:{rank}" for party in "AB" for rank in range(2)
    ]
    assert {own.local.workers for own in found.values() if own.local} == {2}
    assert {own.group_size for own in found.values()} == {4}
    for rank in (1, 2, 3):
        assert (f"A/worker:{rank}", "A/worker:0") in planned.links
    assert [name for name, process in workers(planned).items() if process.endpoints] == ["A/worker:0", "B/worker:0"]


def test_a_group_forms_on_the_party_s_network() -> None:
    inventory = two_hosts()
    planned = plan(choose(inventory, None), replace(SPEC, options={"rank_scope": "global"}))
    found = workers(planned)
    (end,) = found["A/worker:0"].endpoints
    assert (end.bind, end.port) == ("tcp://10.0.0.1:9101", 9101)
    for name in ("A/worker:0", "A/worker:1", "A/worker:2"):
        assert (found[name].env["MASTER_ADDR"], found[name].env["MASTER_PORT"]) == ("10.0.0.1", "9101")
        assert settings(found[name]).rendezvous[0] == "tcp://10.0.0.1:9101"
        assert settings(found[name]).bind == ()
    assert not found["B/worker:0"].endpoints and settings(found["B/worker:0"]).group_size == 1
    shown = next(place for place in preview(inventory) if place.host == "a1")
    assert shown.workers == {"A/worker:0": "gpu0", "A/worker:1": "gpu1"} and shown.groups == {"A/worker:0": 9101}
    few = inventory.with_hosts(
        structs.replace(host, **({"ports": (9100,)} if host.name == "a1" else {})) for host in inventory.hosts
    )
    with pytest.raises(InvalidSettings, match="host a1 needs 2 ports"):
        choose(few, None)


def test_a_group_of_one_host_is_not_reachable_from_others() -> None:
    for process in workers(make()).values():
        assert process.env["MASTER_ADDR"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"algo": "mixed"}, "--reduce torch does not work with --algo mixed"),
        ({"algo": "async", "topology": "flat"}, "--topology flat has no parties"),
        ({"algo": "local", "parties": 1, "workers": 1}, "does not work with --algo local"),
        ({"shards": 2, "algo": "esync"}, "--shards does not work with --algo esync"),
        ({"shards": 2, "workers": 3}, "party A has 3 workers, and --shards is 2"),
        ({"shards": 2, "reduce": "servers"}, "--shards 2 without --reduce torch"),
        ({"spec": replace(SPEC, script=())}, "is for scripts that call geomx_cli.torch.wrap, not the bundled job"),
    ],
)
def test_what_cannot_be_reduced_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=re.escape(message)):
        make(**given)
    assert preview(structs.replace(two_hosts(), topology="flat"))
