"""Jobs whose relays are fixed (plugins/forced.py), and what was relayed in them."""

import json
import os
from collections.abc import Mapping, Sequence

from cluster import ROOT, Cluster
from rounds import SCRIPT

from geomx_cli.core.options import Value

PLUGINS = ROOT / "tests" / "plugins"
BY_HAND = {"GEOMX_DELIVERY": "forced", "PYTHONPATH": f"{ROOT}{os.pathsep}{PLUGINS}"}
"""Variables of processes that are started by hand."""


def launch_planned(
    cluster: Cluster, parties: int, through: str, rounds: int, options: Mapping[str, Value] = {},
    hosts: Mapping[str, Mapping[str, object]] = {}, script: Sequence[str] = SCRIPT, **env: str,
) -> None:  # fmt: skip
    """A planned job in which the processes of `through` send through others. hosts: changes of these; then there is one
    for each party.
    """
    values: dict[str, Value] = {
        "delivery": "forced", "parties": parties, "slice_elements": 20_000, "heartbeat": 0.2, "rank_scope": "global",
        **options,
    }  # fmt: skip
    planned = {"PYTHONPATH": str(PLUGINS), "THROUGH": through, "EVENTS": "1"}
    found = cluster.planned(script[1:], values, env=planned, hosts=hosts, one_host=not hosts)
    cluster.environment = {
        "OUT": str(cluster.directory / "w{rank}.npz"), "ROUNDS": str(rounds), "SERVER_OPTIMIZER": "1", **env,
    }  # fmt: skip
    cluster.launch_planned(found)


def relayed(cluster: Cluster, process: str, what: str, of: str = "relayed") -> int:
    """What this process has counted so far, of what it relayed or of "datagrams"."""
    path = cluster.directory / "events" / f"{process}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return max((event.get(of, {}).get(what, 0) for event in events if event["event"] == "telemetry"), default=0)
