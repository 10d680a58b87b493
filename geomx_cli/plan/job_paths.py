"""Default ids and paths of jobs."""

import os
import secrets
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from geomx_cli.core.jobs_folder import jobs_folder
from geomx_cli.plan.job_spec import JobSpec

__all__ = ["complete", "new_job_id"]

_TOKEN = 4  # bytes


def new_job_id() -> str:
    """Return a unique job id, sortable by time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(_TOKEN)}"


def complete(spec: JobSpec) -> JobSpec:
    """Fill in a missing job id, and missing paths with the defaults."""
    job = spec.job or new_job_id()
    directory = spec.job_dir or str(jobs_folder() / job)
    sockets = spec.socket_dir or str(Path(tempfile.gettempdir(), f"gx-{os.getuid()}-{secrets.token_hex(_TOKEN)}"))
    key_dir = spec.key_dir or str(Path(directory, "keys"))
    return replace(spec, job=job, job_dir=directory, socket_dir=sockets, key_dir=key_dir)
