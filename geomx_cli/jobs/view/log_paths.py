"""Descriptions of where a job's files are."""

from geomx_cli.plan import Plan

__all__ = ["is_here", "host_suffix", "on_hosts", "log_paths"]


def host_suffix(host: str, plan: Plan) -> str:
    """Suffix for a path on `host`, if the path may not be accessible here."""
    return "" if plan.job_dirs[host] == plan.spec.job_dir else f" on host {host}"


def log_paths(plan: Plan) -> str:
    """Describe where the job's logs are."""
    return f"logs are in {plan.spec.job_dir}/logs" if is_here(plan) else f"logs lie {on_hosts(plan.job)}"


def is_here(plan: Plan) -> bool:
    """Whether all of the job's files are on this machine."""
    return all(path == plan.spec.job_dir for path in plan.job_dirs.values())


def on_hosts(job: str) -> str:
    """How to access logs on other machines."""
    return f"on the hosts: geomx logs {job}, or geomx logs collect {job} --to DIR"
