"""Where the files of a job lie, in words."""

from geomx_cli.jobs.store import Job
from geomx_cli.plan import Plan

__all__ = ["is_here", "of_host", "on_hosts", "log_paths"]


def of_host(host: str, plan: Plan, job: Job) -> str:
    """Behind a path of a host: that it is of that host, when it may not be found here."""
    return "" if plan.job_dirs[host] == str(job.directory) else f" on host {host}"


def log_paths(job: Job, plan: Plan) -> str:
    """Where the logs of a job are."""
    return f"logs are in {job.logs}" if is_here(job, plan) else f"logs lie {on_hosts(job.id)}"


def is_here(job: Job, plan: Plan) -> bool:
    """Whether all of it lies on this machine."""
    return all(path == str(job.directory) for path in plan.job_dirs.values())


def on_hosts(job: str) -> str:
    """How to come to logs that lie elsewhere."""
    return f"on the hosts: geomx logs {job}, or geomx logs collect {job} --to DIR"
