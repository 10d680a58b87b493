"""A check result: its subject, level, problem and remedy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from geomx_cli.core.errors import CheckFailed, HostUnreachable

__all__ = ["REACHABLE", "Check", "Level", "exit_code", "refuse", "together"]

Level = Literal["ok", "warning", "problem"]
REACHABLE = "reachable"
"""Name of the check that a host responds."""


@dataclass(frozen=True)
class Check:
    """One finding. `subject` is a host or several ("alpha", "alpha, beta"), a link in the direction of dialling
    ("alpha -> hub"), or the inventory. `what` states the problem and `fix` the remedy, without full stops; both are
    "" at level "ok".
    """

    subject: str
    name: str
    level: Level = "ok"
    what: str = ""
    fix: str = ""

    @property
    def text(self) -> str:
        """The subject and its problem."""
        return f"{self.subject}: {self.what}"


def together(checks: Sequence[Check]) -> list[Check]:
    """Return the checks, those that are not ok first; identical findings for several hosts, e.g. on one machine, are
    merged.
    """
    fine = [check for check in checks if check.level == "ok"]
    found: dict[Check, list[str]] = {}
    for check in checks:
        if check.level != "ok":
            found.setdefault(replace(check, subject=""), []).append(check.subject)
    return [*(replace(check, subject=", ".join(dict.fromkeys(names))) for check, names in found.items()), *fine]


def exit_code(checks: Iterable[Check]) -> int:
    """Return 4 if a host is unreachable, 5 for any other problem, else 0."""
    problems = [check for check in checks if check.level == "problem"]
    if any(check.name == REACHABLE for check in problems):
        return HostUnreachable.exit_code
    return CheckFailed.exit_code if problems else 0


def refuse(checks: Iterable[Check]) -> None:
    """Raise HostUnreachable or CheckFailed with the text of all problems, if any."""
    problems = [check for check in checks if check.level == "problem"]
    if not problems:
        return
    kind = HostUnreachable if exit_code(problems) == HostUnreachable.exit_code else CheckFailed
    if len(problems) == 1:
        raise kind(problems[0].text, problems[0].fix)
    words = [f"  {check.text}\n    {check.fix}".rstrip() for check in problems]
    raise kind("\n".join([f"{len(problems)} problems:", *words]))
