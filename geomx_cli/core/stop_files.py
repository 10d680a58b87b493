"""Two files of an agent. One tells its processes that the job is asked to stop, the other that they have to end."""

from contextlib import suppress
from pathlib import Path

__all__ = ["StopFiles"]


class StopFiles:
    """The files are beside the agent's socket, so every program that a script starts finds them.

    path: of the first file; "" in a process without an agent.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def asked(self) -> bool:
        """Whether the job is asked to stop. Processes that wait for this may use the grace period to end by themselves.
        """
        return bool(self.path) and Path(self.path).exists()

    @property
    def ends(self) -> bool:
        """Whether the agent ends its processes. If so, SIGTERM is from the agent, and no request to stop the job."""
        return bool(self.path) and self._end.exists()

    @property
    def paths(self) -> list[Path]:
        """The paths of both files."""
        return [Path(self.path), self._end]

    def ask(self) -> None:
        """Tell processes that the job is asked to stop. On a full disk this is not possible."""
        with suppress(OSError):
            Path(self.path).touch(0o600)

    def end(self) -> None:
        """Tell processes, before they get SIGTERM, that it is from the agent. On a full disk this is not possible."""
        with suppress(OSError):
            self._end.touch(0o600)

    @property
    def _end(self) -> Path:
        return Path(f"{self.path}.end")
