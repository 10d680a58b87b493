"""Default ids and paths of jobs."""

import os
import secrets
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from platformdirs import user_state_path

from geomx_cli.plan.job_spec import JobSpec

__all__ = ["complete", "jobs_folder"]


def jobs_folder() -> Path:
    """Return the directory of jobs: $XDG_STATE_HOME/geomx/jobs, or ~/.local/state/geomx/jobs."""
    return user_state_path("geomx") / "jobs"


def complete(spec: JobSpec) -> JobSpec:
    """Fill in a missing job id, sortable by time, and missing paths with the defaults."""
    token = secrets.token_hex(4)
    job = spec.job or f"{time.strftime('%Y%m%d-%H%M%S')}-{token}"
    directory = spec.job_dir or str(jobs_folder() / job)
    sockets = spec.socket_dir or str(Path(tempfile.gettempdir(), f"gx-{os.getuid()}-{token}"))
    key_dir = spec.key_dir or str(Path(directory, "keys"))
    return replace(spec, job=job, job_dir=directory, socket_dir=sockets, key_dir=key_dir)
