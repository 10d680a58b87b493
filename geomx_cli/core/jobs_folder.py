"""The directory of this machine's jobs."""

from pathlib import Path

from platformdirs import user_state_path

__all__ = ["jobs_folder"]


def jobs_folder() -> Path:
    """Return the directory of jobs: $XDG_STATE_HOME/geomx/jobs, or ~/.local/state/geomx/jobs."""
    return user_state_path("geomx") / "jobs"
