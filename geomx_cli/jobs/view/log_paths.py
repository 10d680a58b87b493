"""Descriptions of where a job's files are."""

from geomx_cli.plan import Plan

__all__ = ["is_here", "host_suffix", "on_hosts", "log_paths"]


def host_suffix(host: str, plan: Plan) -> str:
    """Suffix for a path on `host`, if that is another machine; equal paths may be different files there."""
    return "" if host in plan.here else f" on host {host}"


def log_paths(plan: Plan) -> str:
    """Describe where the job's logs are."""
    return f"logs are in {plan.spec.job_dir}/logs" if is_here(plan) else f"logs lie {on_hosts(plan.job)}"


def is_here(plan: Plan) -> bool:
    """Whether all of the job's files are on this machine."""
    return all(host in plan.here and path == plan.spec.job_dir for host, path in plan.job_dirs.items())


def on_hosts(job: str) -> str:
    """How to access logs on other machines."""
    return f"on the hosts: geomx logs {job}, or geomx logs collect {job} --to DIR"
