"""The end of a job for launch, attach and status: its result, and the error to raise."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import DoneInPart, GeomxError, Interrupted
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.view.failure_report import explain
from geomx_cli.jobs.view.outcome import Outcome
from geomx_cli.jobs.view.progress import Totals
from geomx_cli.jobs.view.result import result
from geomx_cli.plan import Plan

__all__ = ["Conclusion", "conclude"]


@dataclass(frozen=True)
class Conclusion:
    """`result` is printed to stdout unless empty, then `error` is raised; see result.py."""

    result: Mapping[str, Any] = field(default_factory=dict)
    error: GeomxError | None = None

    @classmethod
    def of(cls, plan: Plan, outcome: Outcome, totals: Totals, total_s: float) -> "Conclusion":
        """Build the conclusion for `outcome`. `total_s`: seconds from start to end."""
        error = _error_of(outcome, plan)
        return cls(result(plan, outcome, error, totals, total_s), error)

    def with_late_interrupt(self, interrupted: bool, job: str) -> "Conclusion":
        """`self`, with Interrupted if a signal came after the end of a job that is done: what follows it must stop."""
        if interrupted and self.error is None:
            return replace(self, error=Interrupted(f"job {job} is done; Ctrl-C came after its end"))
        return self


def conclude(plan: Plan, outcome: Outcome, totals: Totals, total_s: float) -> Conclusion:
    """Build the conclusion for `outcome` and record it in state.json."""
    end = Conclusion.of(plan, outcome, totals, total_s)
    job_state.finish(Path(plan.spec.job_dir), end.result)
    return end


def _error_of(outcome: Outcome, plan: Plan) -> GeomxError | None:
    """The error to raise for `outcome`; None for success. The result says where the logs are."""
    if outcome.interrupted:
        by = f" by {outcome.stopped_by}" if outcome.stopped_by else ""
        if outcome.problems:
            message = f"job {plan.job} was stopped{by}, but: {'; '.join(outcome.problems)}"
            hint = f"what still runs there ends when the lease expires, or by geomx stop {plan.job}, which says so"
            return Interrupted(message, hint)
        return Interrupted(f"job {plan.job} was stopped{by}")
    if outcome.failure is not None:
        return explain(outcome.failure, plan)
    if outcome.lingering:
        names = ", ".join(outcome.lingering)
        return DoneInPart(f"training is done, but {names} had to be stopped")
    if outcome.problems:
        return DoneInPart(f"training is done, but: {'; '.join(outcome.problems)}")
    return None
