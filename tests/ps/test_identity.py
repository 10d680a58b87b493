"""The holder of a key is the process that it was made for, and no other; invalid identities are refused."""

import json
from pathlib import Path

import pytest
from cluster import Cluster
from rounds import HOSTILE, PLANNED_ROUNDS, SCRIPT, assert_equal, expected, found_in, launch_planned

from geomx_cli.contract.security import Identity
from geomx_cli.core.options import defaults
from geomx_cli.plan import JobSpec, plan
from geomx_cli.plan.ports import ports_needed
from geomx_cli.plan.this_machine import this_machine

FLAT = {"parties": 2, "workers": 2, "topology": "flat"}
"""Four workers, which dial the server of another host by TCP."""


def test_a_member_that_lies_and_misbehaves_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    planned = cluster.planned(SCRIPT[1:], {**FLAT, "heartbeat": 0.3}, one_host=False)
    (target,) = [end.bind for end in planned.process("central/server:0").endpoints if end.bind.startswith("tcp")][:1]
    liar = planned.process("A/worker:1")
    cluster.each[liar.file_name] = {"TARGET": target, "OTHER": "A/worker:0"}
    launch_planned(cluster, planned, {liar.file_name: HOSTILE})
    cluster.finish()
    found = found_in(tmp_path)
    assert_equal(found, expected([[0, 1, 2, 3]], dict.fromkeys(range(4), PLANNED_ROUNDS), optimizer=True))
    events = [json.loads(line) for line in (tmp_path / "events/central-server-0.jsonl").read_text().splitlines()]
    refused = [event["refused"] for event in events if "refused" in event][-1]
    assert refused["malformed"] >= 8 + 10 + 4
    messages = [event.get("message", "") for event in events]
    assert any("A/worker:1 asks for optimizer 7, which nobody has set" in message for message in messages)
    told = cluster.output(liar.file_name)
    assert "central/server:0 refused a message of this process: contributions of ranks (0,) from rank 1" in told


def test_each_listener_knows_who_dials_it_and_as_what() -> None:
    options = {**defaults(), "parties": 2, "workers": 2, "local_servers": 2, "global_servers": 2, "central_workers": 1}
    inventory = this_machine(options, range(20_000, 20_000 + ports_needed(options)))
    found = plan(inventory, JobSpec(job="x", options=options, job_dir="/j", socket_dir="/s")).callers
    assert found["B/scheduler:0"] == {
        name: Identity(name, role, rank)
        for name, role, rank in (
            ("B/server:0", "server", 0), ("B/server:1", "server", 1), ("B/worker:0", "worker", 0),
            ("B/worker:1", "worker", 1),
        )
    }  # fmt: skip
    assert found["central/global_scheduler:0"]["B/server:1"] == ("B/server:1", "worker", 3)
    assert found["central/global_scheduler:0"]["central/global_server:1"] == ("central/global_server:1", "server", 1)
    assert found["central/scheduler:0"]["central/global_server:1"] == ("central/global_server:1", "server", 1)
    assert found["central/global_server:1"]["B/server:0"] == ("B/server:0", "party", 1)
    assert found["central/global_server:1"]["central/worker:0"] == ("central/worker:0", "worker", 0)
    assert set(found["A/server:0"]) == {"A/worker:0", "A/worker:1"}
    assert "A/worker:0" not in found


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("A/worker:1", {"GEOMX_RANK": "0"}, "for which its key was not made"),
        ("A/worker:1", {"GEOMX_PROCESS": "A/worker:0", "GEOMX_RANK": "0"}, "waited 3 s for an answer of its scheduler"),
    ],
)
def test_a_process_with_the_variables_of_another_is_refused(
    cluster: Cluster, name: str, changes: dict[str, str], said: str
) -> None:
    planned = cluster.planned(SCRIPT[1:], {**FLAT, "timeout": 3.0}, one_host=False)
    cluster.each[planned.process(name).file_name] = changes
    launch_planned(cluster, planned)
    statuses = cluster.wait()
    own = planned.process(name).file_name
    assert statuses[own] and said in cluster.output(own), cluster.outputs()
    assert all(statuses[other] for other in statuses if "worker" in other), cluster.outputs()
