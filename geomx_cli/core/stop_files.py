"""Two files by which an agent tells its processes that the job is asked to stop, and that they are to end."""

from contextlib import suppress
from pathlib import Path

__all__ = ["StopFiles"]


class StopFiles:
    """Beside the agent's socket: a process finds them at any time, in whatever program of its script it runs.

    path: of the first; "" in a process without an agent, which is told nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def asked(self) -> bool:
        """Whether somebody asks the job to stop: processes that await that have the grace to end by themselves."""
        return bool(self.path) and Path(self.path).exists()

    @property
    def ends(self) -> bool:
        """Whether the agent ends its processes: SIGTERM is then from the agent, and no wish of somebody else."""
        return bool(self.path) and self._end.exists()

    @property
    def paths(self) -> list[Path]:
        """Of both files."""
        return [Path(self.path), self._end]

    def ask(self) -> None:
        """Tell processes that the job is asked to stop. On a full disk they are not told."""
        with suppress(OSError):
            Path(self.path).touch(0o600)

    def end(self) -> None:
        """Tell processes, before they get SIGTERM, that it is from the agent. On a full disk they are not told."""
        with suppress(OSError):
            self._end.touch(0o600)

    @property
    def _end(self) -> Path:
        return Path(f"{self.path}.end")
