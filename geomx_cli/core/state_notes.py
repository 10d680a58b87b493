"""Notes in the folders of saved states: whether a process may have a next life, and how far it has come.

A note is a file. So it outlives its writer, and one process can read it while another writes it.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["StateNotes", "are_continued", "end_recovery", "forbid", "lack_of_room", "permit"]

_ENDED = "ended"
_CONTRIBUTED = "contributed"
_PARTING = "parting"
_OVER = "over"
_CONTINUES = "continues"
_MOST = 500  # characters of a hint


class StateNotes:
    """The notes of one process. Thread-safe.

    folder: of the process's state.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spare = folder.with_name(f"{folder.name}.spare")  # becomes the note of the end: it needs no room then

    def prepare(self) -> None:
        """Before the process starts: make sure that it can `end` on a full disk. Raises OSError."""
        if not self.has_ended:
            self._spare.touch(0o600)

    def end(self, files: Sequence[str] = (), why: str = "") -> None:
        """The process saves nothing any more, so no life follows. Remove its saved state, because others know newer
        states.

        The note comes first: if the process is killed in between, both are there, not neither.

        files: names of the files with the state. why: a hint for the user of a script.
        """
        note = self._folder / _ENDED
        try:
            self._spare.replace(note)
        except OSError:  # it has none, or has ended before
            with suppress(OSError):
                note.touch(0o600)
        for name in files:
            with suppress(OSError):
                (self._folder / name).unlink(missing_ok=True)
        if why:
            with suppress(OSError):
                note.write_text(why[:_MOST])

    def go_on(self) -> None:
        """The process saves again."""
        with suppress(OSError):
            (self._folder / _ENDED).replace(self._spare)

    @property
    def has_ended(self) -> bool:
        """Whether the process saves nothing any more: it had no room, or does not know what to save."""
        return (self._folder / _ENDED).exists()

    @property
    def is_lost(self) -> bool:
        """Whether another program has removed the state after `prepare`. A next life would begin without it."""
        # Twice, because the process may rename the one to the other meanwhile.
        return not (self._spare.exists() or self.has_ended or self._spare.exists())

    @property
    def hint(self) -> str:
        """What the user's script lacks so that it can continue; "" if the process has noted nothing."""
        with suppress(OSError), (self._folder / _ENDED).open(errors="replace") as file:
            return file.read(_MOST)
        return ""

    # In a job that continues without a worker that dies.

    @property
    def contributions(self) -> Path:
        """The file with the number of the last round to which the worker has contributed. Without it no other process
        may leave the job in the worker's name.
        """
        return self._folder / _CONTRIBUTED

    @property
    def contributed(self) -> int | None:
        """The last round to which the worker has contributed; None before the first, or if another process cannot
        complete the contributions.
        """
        try:
            return int(self.contributions.read_bytes())
        except (OSError, ValueError):
            return None

    # At the end of a worker.

    def part(self) -> None:
        """The worker has done all, and only says goodbye."""
        with suppress(OSError):
            (self._folder / _PARTING).touch()

    @property
    def is_parting(self) -> bool:
        """Whether an earlier life was killed while it said goodbye."""
        return (self._folder / _PARTING).exists()

    def note_over(self) -> None:
        """The scripts of all workers of this one's process group are over: its next life only leaves the job. Raises
        OSError.
        """
        (self._folder / _OVER).touch()

    def forget_over(self) -> None:
        """The whole group begins again."""
        (self._folder / _OVER).unlink(missing_ok=True)

    @property
    def is_over(self) -> bool:
        """Whether `note_over` was called."""
        return (self._folder / _OVER).exists()


# A process cannot save its state any more, and the job continues.


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


# In the folder of a host, which has those of its processes.


def permit(folder: Path) -> None:
    """From now on another agent may follow the one that runs, and start the processes again. Raises OSError."""
    (folder / _CONTINUES).touch(0o600)


def forbid(folder: Path) -> None:
    """No agent follows any more. Works on a full disk."""
    (folder / _CONTINUES).unlink(missing_ok=True)


def are_continued(folder: Path) -> bool:
    """Whether processes that die may still be started again by another agent."""
    return (folder / _CONTINUES).exists()
