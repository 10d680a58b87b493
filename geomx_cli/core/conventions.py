"""Conventions of a job: command lines, the clock that times all its events, names of files, and numbers."""

import re
import time

__all__ = [
    "START_FOLDER", "JobClock", "file_name", "life_of", "module_command", "number_before", "party_of", "shell_name",
]  # fmt: skip

START_FOLDER = "start"
"""The folder, in a job's directory, of what a job with other numbers has left to it (contract/earlier_job.py)."""


def module_command(python: str, module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of geomx with this Python. Other accounts may be able to write to the
    working directory; -P prevents files in it from shadowing modules.
    """
    return [python, "-P", "-m", module, *arguments]


class JobClock:
    """Unix seconds by the clock of the machine that launched the job, so that times of different hosts can be compared.

    ahead: seconds by which this host's clock was ahead of the launching machine's clock at launch. After a JobClock is
        created, stepping the host's clock has no effect on it.
    Thread-safe.
    """

    def __init__(self, ahead: float = 0.0) -> None:
        self._offset = time.time() - ahead - _since_boot()

    def time(self) -> float:
        """The time now."""
        return self._offset + _since_boot()


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # continues while a laptop sleeps, unlike time.monotonic


def file_name(process: str) -> str:
    """Return a process's name as a path component: "A-worker-1" for "A/worker:1"."""
    return process.replace("/", "-").replace(":", "-")


def party_of(process: str) -> str:
    """Return the party of a planned process: "A" for "A/worker:1"."""
    return process.partition("/")[0]


def shell_name(text: str) -> str:
    """Return a text as a path component that a shell takes without quotes: "HFA-cnn" for "HFA (cnn)"."""
    return re.sub(r"[^A-Za-z0-9._+=,@%-]+", "-", text).strip("-") or "_"


_LIFE = 36  # bits


def number_before(incarnation: int) -> int:
    """Return the number before the first event or request of an incarnation, so that no number occurs in two lives."""
    return incarnation << _LIFE


def life_of(number: int) -> int:
    """Return the incarnation that gave an event or request this number."""
    return number >> _LIFE
