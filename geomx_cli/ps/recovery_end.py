"""The end of recovery: a process cannot save its state any more, and the job continues."""

from collections.abc import Callable, Sequence
from pathlib import Path

from geomx_cli.core.state_notes import StateNotes

__all__ = ["end_recovery", "lack_of_room"]


def end_recovery(folder: Path, files: Sequence[str], why: str, role: str, warn: Callable[[str], object]) -> None:
    """Drop the saved state, because it no longer matches what other processes know, and warn. Close its files before.

    folder: of the process's state. files: names of the files with the state. role: of the process, for the warning.
    """
    StateNotes(folder).end(files)
    warn(lack_of_room(folder, why, f"this {role} is killed", "--restarts 0"))


def lack_of_room(folder: Path, why: str, event: str, option: str) -> str:
    """The warning that the job ends if this event happens. option: turns off what needs the room."""
    return (
        f"{folder} has no more room ({why}): if {event} from now on, the job ends. Make room there, or use {option}"
    )
