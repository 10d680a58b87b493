"""Whether a process that has died may have a next life: its agent decides this, or the next agent."""

import signal
from pathlib import Path
from typing import NamedTuple

from geomx_cli.agent.host_spec import Task
from geomx_cli.core.state_notes import StateNotes

__all__ = ["ASKED", "WINDOW", "NextLife", "next_life"]

WINDOW = 600.0
"""Seconds in which `--restarts` limits the restarts of a process, and the agents that follow killed ones."""
ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which somebody asks a process to end."""
_MOST = 1000  # lives of a process, so that their numbers fit


class NextLife(NamedTuple):
    """What a next life can do.

    continues: go on from the state that the process has saved.
    leaves: leave the job in the name of the process.
    """

    continues: bool
    leaves: bool


def next_life(task: Task, folder: Path | None, number: int, on_worker_loss: str) -> NextLife:
    """Return what the next life of a process can do.

    folder: of its state; None without any. number: of the next life. on_worker_loss: the option.
    """
    if folder is None or number > _MOST:
        return NextLife(False, False)
    notes = StateNotes(folder)
    leaves = on_worker_loss == "leave" and task.runs_script and notes.contributed is not None
    return NextLife(task.resumes and not (notes.has_ended or notes.is_lost), leaves)
