"""What of a job does not change while the page shows it: its options, its hosts, its processes' number."""

from typing import Any

from geomx_cli.core import plugins
from geomx_cli.core.errors import GeomxError
from geomx_cli.core.option_kinds import KINDS
from geomx_cli.jobs.store.registry import KnownJob

__all__ = ["job_facts"]

MOST_NAMES = 2000


def job_facts(job: KnownJob) -> dict[str, Any]:
    """Return, for JSON, a line about the emulated network, "" for none; the options with text values, those not at
    their defaults first; the hosts; the names of the first 2000 processes.
    """
    plan = job.plan
    try:
        known = {option.name: option for option in plugins.table()}
    except GeomxError:  # a plug-in of this machine; the job has its own
        known = {}
    options = []
    for name, value in plan.spec.options.items():
        option = known.get(name)
        text = str(value) if option is None else KINDS[option.kind].format(value)
        options.append({"name": name, "value": text, "default": option is not None and value == option.default})
    return {
        "job": job.id,
        "what": job.what,
        "network": plan.network,
        "script": bool(plan.spec.script),
        "options": sorted(options, key=lambda one: one["default"]),
        "hosts": list(plan.hosts)[:MOST_NAMES],
        "processes": [process.name for process in plan.processes[:MOST_NAMES]],
    }
