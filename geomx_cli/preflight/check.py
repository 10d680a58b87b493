"""A check: what was looked at, how it is, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from geomx_cli.core.errors import CheckFailed, HostUnreachable

__all__ = ["REACHABLE", "Check", "Level", "exit_code", "refuse", "together"]

Level = Literal["ok", "warning", "problem"]
REACHABLE = "reachable"
"""The name of the check that a host answers."""


@dataclass(frozen=True)
class Check:
    """One finding. `subject` is a host or several ("alpha", "alpha, beta"), a link in the direction of dialling
    ("alpha -> hub"), or the inventory. `what` says what is wrong with it and `fix` what to do, neither with a full
    stop; both are "" when the level is ok.
    """

    subject: str
    name: str
    level: Level = "ok"
    what: str = ""
    fix: str = ""

    @property
    def text(self) -> str:
        """What is wrong, and with what."""
        return f"{self.subject}: {self.what}"


def together(checks: Sequence[Check]) -> list[Check]:
    """The checks, those that are not ok first; what is said of several hosts alike, as of those on one machine, is
    one."""
    fine = [check for check in checks if check.level == "ok"]
    found: dict[Check, list[str]] = {}
    for check in checks:
        if check.level != "ok":
            found.setdefault(replace(check, subject=""), []).append(check.subject)
    return [*(replace(check, subject=", ".join(dict.fromkeys(names))) for check, names in found.items()), *fine]


def exit_code(checks: Iterable[Check]) -> int:
    """4 when a host cannot be reached, 5 when there is another problem, 0 otherwise."""
    problems = [check for check in checks if check.level == "problem"]
    if any(check.name == REACHABLE for check in problems):
        return HostUnreachable.exit_code
    return CheckFailed.exit_code if problems else 0


def refuse(checks: Iterable[Check]) -> None:
    """Raise HostUnreachable or CheckFailed with the words of all problems; return when there is none."""
    problems = [check for check in checks if check.level == "problem"]
    if not problems:
        return
    kind = HostUnreachable if exit_code(problems) == HostUnreachable.exit_code else CheckFailed
    if len(problems) == 1:
        raise kind(problems[0].text, problems[0].fix)
    words = [f"  {check.text}\n    {check.fix}".rstrip() for check in problems]
    raise kind("\n".join([f"{len(problems)} problems:", *words]))
