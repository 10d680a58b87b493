"""An agent's part in checkpoints, which the control machine or a visitor requests. Each requester ends its own
checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from geomx_cli.agent.checkpoints import Checkpoints
from geomx_cli.agent.child import Child
from geomx_cli.agent.control import Control, Message
from geomx_cli.agent.uploads import LIMIT, Uploads

__all__ = ["CheckpointService"]


class CheckpointService:
    """Answers by `control`. Used by the agent's loop only.

    directory: the agent's. environment: of processes that upload.
    """

    def __init__(
        self, directory: Path, children: Sequence[Child], control: Control, environment: Callable[[], Mapping[str, str]]
    ) -> None:
        self._control = control
        self._uploads = Uploads(directory, environment)
        self._checkpoints = Checkpoints(directory, children, lambda: self._uploads.number)
        self._freezer = self._uploader = 0  # the visitors that have asked for that; 0: the control machine

    @property
    def frozen(self) -> bool:
        """Whether the processes are stopped, for a checkpoint."""
        return self._checkpoints.frozen

    def obey(self, message: Message, *, running: bool) -> None:
        """Do a part of a checkpoint. running: all processes are."""
        visitor, number = int(message.get("visitor", 0)), int(message.get("number", 0))
        limit = float(message.get("limit", LIMIT))
        is_own = self._checkpoints.frozen and visitor == self._freezer
        match message.get("type"):
            case "freeze":
                problem = "" if running else "its processes begin or end"
                problem = problem or self._checkpoints.freeze()
                if not problem:
                    self._freezer = visitor
                newest = self._checkpoints.newest
                self._control.answer(visitor, {"type": "frozen", "problem": problem, "newest": newest})
            case "keep" if is_own:
                self._checkpoints.keep(number)
            case "thaw" if is_own:
                self._checkpoints.thaw()
            case "upload":
                self._uploader = visitor
                self._uploads.begin("upload", number, publishes=bool(message.get("publishes")), limit=limit)
            case "publish":
                self._uploader = visitor
                self._uploads.begin("publish", number, [str(host) for host in message.get("hosts", ())], limit=limit)
            case "drop":
                self._uploads.abandon()

    def check(self, now: float) -> None:
        """Call regularly. now: time.monotonic seconds."""
        if (problem := self._checkpoints.check(now)) is not None:
            self._control.answer(self._freezer, {"type": "kept", "problem": problem})
        if (ended := self._uploads.check()) is not None:
            self._control.answer(self._uploader, ended, durable=True)

    def delays_end(self) -> bool:
        """Whether this host's part of the job, which is over, waits for an upload."""
        return self._uploads.delays_end(connected=self._control.connected)

    def abandon(self) -> None:
        """End an upload."""
        self._uploads.abandon()

    def remove(self) -> None:
        """Remove the checkpoints on this host: the job needs them no more."""
        self._checkpoints.remove()
