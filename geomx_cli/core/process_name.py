"""File names derived from process names."""

__all__ = ["file_name"]


def file_name(process: str) -> str:
    """Return a process's name as a path component: "A-worker-1" for "A/worker:1"."""
    return process.replace("/", "-").replace(":", "-")
