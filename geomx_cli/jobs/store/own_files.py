"""The files in a job's directory that only the control machine has."""

from geomx_cli.jobs.store import job_state

__all__ = ["DASHBOARD", "OWN", "REDIRECT_PAGE"]

DASHBOARD = "dashboard.json"
"""Port and token of the job's last dashboard."""
REDIRECT_PAGE = "dashboard.html"
"""Leads a browser to it."""
OWN = (DASHBOARD, REDIRECT_PAGE, "inventory.json", job_state.FILE_NAME, "plan.json")
"""All, in the order in which they are removed: without the last, the job is no longer known here."""
