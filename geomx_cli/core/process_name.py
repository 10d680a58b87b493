"""What a process is called, and its files."""

__all__ = ["file_name"]


def file_name(process: str) -> str:
    """A process's name as part of a path: "A/worker:1" is "A-worker-1"."""
    return process.replace("/", "-").replace(":", "-")
