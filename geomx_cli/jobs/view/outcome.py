"""How a job ended, or why it is no longer followed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from geomx_cli.core.root_cause import Failure

__all__ = ["Outcome"]


@dataclass
class Outcome:
    """The outcome. `failure`: the first one; `lingering`: processes that did not end after the training.

    `stopped_by`: who requested the stop, other than the user at this terminal ("geomx stop"). `left`: why a job that
    still runs was released.
    """

    failure: Failure | None = None
    interrupted: bool = False
    stopped_by: str = ""
    left: str = ""
    lingering: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """How the job ended: "done", if only in part, "failed" or "interrupted"; "" if it was released."""
        if self.left:
            return ""
        return "interrupted" if self.interrupted else "failed" if self.failure is not None else "done"
