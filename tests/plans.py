"""A plan without files, for tests of what reads plans."""

from typing import Any

from geomx_cli.core import plugins
from geomx_cli.core.options import defaults
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.plan.this_machine import this_machine


def planned(*script: str, one_host: bool = False, **options: Any) -> Plan:
    """Two parties of two workers."""
    values = {**defaults(plugins.table()), **options}
    spec = JobSpec("job-1", values, script, job_dir="/jobs/job-1", socket_dir="/run/x")
    return plan(this_machine(values, range(9000, 12000), one_host=one_host), spec)
