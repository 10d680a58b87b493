"""File names derived from names of processes, and of other things."""

import re

__all__ = ["file_name", "party_of", "shell_name"]


def file_name(process: str) -> str:
    """Return a process's name as a path component: "A-worker-1" for "A/worker:1"."""
    return process.replace("/", "-").replace(":", "-")


def party_of(process: str) -> str:
    """Return the party of a planned process: "A" for "A/worker:1"."""
    return process.partition("/")[0]


def shell_name(text: str) -> str:
    """Return a text as a path component that a shell takes without quotes: "HFA-cnn" for "HFA (cnn)"."""
    return re.sub(r"[^A-Za-z0-9._+=,@%-]+", "-", text).strip("-") or "_"
