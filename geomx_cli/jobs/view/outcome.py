"""How a job has ended, or why nobody follows it any more."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from geomx_cli.core.root_cause import Failure

__all__ = ["Outcome"]


@dataclass
class Outcome:
    """How it went. `failure` came first; `lingering` names processes that did not end after the training had.

    `stopped_by`: who, other than the user at this terminal, asked for the end ("geomx stop"). `left`: why we let
    go of a job that goes on.
    """

    failure: Failure | None = None
    interrupted: bool = False
    stopped_by: str = ""
    left: str = ""
    lingering: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)
