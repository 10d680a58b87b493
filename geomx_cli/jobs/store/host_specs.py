"""What the agent of each host is given: its part of the plan, and the keys of its processes."""

from collections.abc import Mapping

from geomx_cli.agent.host_spec import HostSpec, Task
from geomx_cli.contract import security
from geomx_cli.core import env_names
from geomx_cli.hosts import File
from geomx_cli.inventory import Inventory
from geomx_cli.plan import Plan

__all__ = ["host_specs", "key_files"]


def host_specs(
    plan: Plan, inventory: Inventory, working_dirs: Mapping[str, str], lease: float
) -> dict[str, HostSpec]:
    """Return each host's part of the plan, which was made of `inventory`. `working_dirs`: working directory of the
    processes per host; `lease`: seconds that they continue without the control machine, 0 for unlimited.
    """
    clear = ("PORT", *env_names.of_options())
    return {
        host: HostSpec(
            job=plan.job,
            host=host,
            job_dir=plan.job_dirs[host],
            sockets=plan.socket_dirs[host],
            socket=f"{plan.socket_dirs[host]}/agent-{index}.sock",
            working_dir=working_dirs[host],
            lease=lease,
            silence=float(plan.spec.options["silence"]),
            grace=float(plan.spec.options["grace"]),
            clock_ahead=inventory.host(host).clock_ahead,
            clear=clear,
            tasks=tuple(Task(process.name, process.argv, process.env) for process in plan.on_host(host)),
        )
        for index, host in enumerate(plan.hosts)
    }


def key_files(plan: Plan) -> dict[str, dict[str, File]]:
    """Return host -> path -> key file for its processes. Every call generates new keys."""
    rings = security.generate(plan.job, {process.name: plan.callers.get(process.name) for process in plan.processes})
    return {
        host: {
            process.env["GEOMX_KEY_FILE"]: File(rings[process.name])
            for process in plan.on_host(host)
            if "GEOMX_KEY_FILE" in process.env
        }
        for host in plan.hosts
    }
