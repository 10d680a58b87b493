"""Renders a plan as readable text."""

import shlex
from collections.abc import Iterator

from geomx_cli.core.units import counted
from geomx_cli.plan import Plan, Process
from geomx_cli.plan.automatic_topology import topology_line

__all__ = ["plan_text"]


def plan_text(plan: Plan) -> str:
    """List each host's processes, one per line, then the command, endpoints and environment of each."""
    details = (line for process in plan.processes for line in _details(process))
    return "\n".join([*_overview(plan), "", *details])


def _overview(plan: Plan) -> Iterator[str]:
    processes = counted(len(plan.processes), "process")
    yield f"job {plan.job}: {processes} on {plan.where}, {topology_line(plan)}"
    if plan.network:
        yield plan.network
    width = max(len(process.name) for process in plan.processes)
    for host in plan.hosts:
        yield f"\nhost {host}"
        for process in plan.on_host(host):
            listens = "  ".join(endpoint.bind for endpoint in process.endpoints) or "dials out only"
            yield f"  {process.name:<{width}}  {listens}"


def _details(process: Process) -> Iterator[str]:
    yield f"{process.name} on {process.host}"
    yield f"  command      {shlex.join(process.argv)}"
    for endpoint in process.endpoints:
        dialled = "" if endpoint.bind == endpoint.advertised else f", dialled as {endpoint.advertised}"
        yield f"  listens      {endpoint.bind} ({endpoint.purpose}, {endpoint.plane} plane{dialled})"
    for number, (name, value) in enumerate(process.env.items()):
        yield f"  {'' if number else 'environment':<11}  {name}={shlex.quote(value)}"
    yield ""
