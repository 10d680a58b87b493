"""The result of a job: a JSON object, printed with `--json` and kept in state.json, and its text form."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from geomx_cli.core.errors import DoneInPart, GeomxError, Interrupted, Resumable, TrainingFailed
from geomx_cli.core.root_cause import Failure
from geomx_cli.core.units import format_bytes, format_duration
from geomx_cli.jobs.store import job_state
from geomx_cli.jobs.view.failure_report import explain, failure_fields
from geomx_cli.jobs.view.outputs import is_here, model_of, on_hosts, summary_line
from geomx_cli.jobs.view.progress import Totals
from geomx_cli.plan import Plan

__all__ = [
    "Conclusion", "Outcome", "RESULT_VERSION", "RESUMABLE", "detached", "record_conclusion", "in_words", "result",
]  # fmt: skip

# How a job ended, or why it is no longer followed.


@dataclass
class Outcome:
    """The outcome.

    failure: the first one.
    stopped_by: who requested the stop, other than the user at this terminal ("geomx stop").
    saved: all workers have then ended with status 0.
    left: why a job that still runs was released.
    lingering: processes that did not end after the training.
    problems: what may still run, or was not released.
    checkpoint: when the newest one was taken, in Unix seconds; None for none.
    uploaded: one is in the store of --checkpoint-to.
    """

    failure: Failure | None = None
    interrupted: bool = False
    stopped_by: str = ""
    saved: bool = False
    left: str = ""
    lingering: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)
    checkpoint: int | None = None
    uploaded: bool = False

    @property
    def status(self) -> str:
        """How the job ended: "done", if only in part, "failed", "interrupted" or "stopped", if its workers have saved;
        "" if it was released.
        """
        if self.left:
            return ""
        if self.resumable:
            return "stopped"
        return "interrupted" if self.interrupted else "failed" if self.failure is not None else "done"

    @property
    def resumable(self) -> bool:
        """Whether the job was stopped, nothing of it is left, and its workers have saved; or a batch system has stopped
        it, and there is a checkpoint.
        """
        kept = self.saved or (self.checkpoint is not None and self.stopped_by in _BY_SYSTEM)
        return self.interrupted and kept and not self.problems


_BY_SYSTEM = ("SIGTERM", "SIGUSR1")


# The end of a job for launch, attach and status: its result, and the error to raise.


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


def record_conclusion(plan: Plan, outcome: Outcome, totals: Totals, total_s: float) -> Conclusion:
    """Build the conclusion for `outcome` and record it in state.json."""
    end = Conclusion.of(plan, outcome, totals, total_s)
    job_state.finish(Path(plan.spec.job_dir), end.result)
    return end


def _error_of(outcome: Outcome, plan: Plan) -> GeomxError | None:
    """The error to raise for `outcome`; None for success. The result says where the logs are."""
    if outcome.interrupted:
        by = f" by {outcome.stopped_by}" if outcome.stopped_by else ""
        later = f"geomx launch --resume {plan.job} goes on from its checkpoint" if outcome.checkpoint else ""
        if outcome.uploaded:
            later += f", and --resume {plan.spec.options['checkpoint_to']}/{plan.job} without this host's files"
        if outcome.resumable:
            return Resumable(f"job {plan.job} was stopped{by}", later or RESUMABLE)
        if outcome.problems:
            message = f"job {plan.job} was stopped{by}, but: {'; '.join(outcome.problems)}"
            hint = f"what still runs there ends when the lease expires, or by geomx stop {plan.job}, which says so"
            return Interrupted(message, hint)
        return Interrupted(f"job {plan.job} was stopped{by}", later)
    if outcome.failure is not None:
        return explain(outcome.failure, plan)
    if outcome.lingering:
        names = ", ".join(outcome.lingering)
        return DoneInPart(f"training is done, but {names} had to be stopped")
    if outcome.problems:
        return DoneInPart(f"training is done, but: {'; '.join(outcome.problems)}")
    return None


RESULT_VERSION = 1
DETACHED = "detached"
RESUMABLE = "all workers have ended by themselves: what they have saved may be resumed"
_STATUS = {Resumable: "stopped", Interrupted: "interrupted", TrainingFailed: "failed", DoneInPart: "done in part"}


def result(plan: Plan, outcome: Outcome, error: GeomxError | None, totals: Totals, total_s: float) -> dict[str, Any]:
    """The result of a job that has ended. `total_s`: seconds from start to end. "logs" is null if on other hosts.
    "model" is its path, HOST:PATH on another machine, or null. "problems": what may still run, or was not released.
    """
    failure = outcome.failure
    return {
        "schema_version": RESULT_VERSION,
        "job": plan.job,
        "status": "done" if error is None else _STATUS[type(error)],
        "exit_code": 0 if error is None else error.exit_code,
        **totals.to_json(),
        "model": model_of(totals.outputs, plan),
        "total_s": total_s,
        "directory": plan.spec.job_dir,
        "logs": f"{plan.spec.job_dir}/logs" if is_here(plan) else None,
        "problems": list(outcome.problems),
        "failure": None if failure is None or outcome.interrupted else failure_fields(failure),
        "error": None if error is None else {"message": error.message, "hint": error.hint},
    }


def detached(plan: Plan) -> dict[str, Any]:
    """The result of a detached job."""
    common = {"schema_version": RESULT_VERSION, "job": plan.job}
    return {**common, "status": DETACHED, "exit_code": 0, "directory": plan.spec.job_dir}


def in_words(result: Mapping[str, Any]) -> str:
    """Summarize a result in lines; "" if there is nothing to summarize."""
    if result["status"] == DETACHED:
        return _how_to_come_back(result["job"])
    if result["status"] == "failed" and not result["rounds"]:
        return ""
    lan, wan = result["bytes"]["lan"], result["bytes"]["wan"]
    accuracy, first = result["accuracy"], result["first_step_s"]
    known = result["training_s"] > 0  # scripts need not report it
    lines = [
        ("status", result["status"]),
        ("WARNING", "; ".join(result["warnings"])),
        ("test accuracy", "" if accuracy is None else f"{accuracy:.4f}"),
        ("validation loss", "" if result.get("validation_loss") is None else f"{result['validation_loss']:.4f}"),
        ("rounds", str(result["rounds"] or "")),
        ("samples/s", f"{result['samples_per_s']:.0f}" if result["samples_per_s"] else ""),
        ("first training step", "" if first is None else f"after {format_duration(first)}"),
        ("training time", format_duration(result["training_s"]) if known else ""),
        ("total time", format_duration(result["total_s"])),
        ("LAN sent / received", f"{format_bytes(lan[0])} / {format_bytes(lan[1])}"),
        ("WAN sent / received", f"{format_bytes(wan[0])} / {format_bytes(wan[1])}"),
        ("compression", _ratio(*result["bytes"]["encoded"])),
        ("LAN compression", _ratio(*result["bytes"]["encoded_lan"])),
        ("datagrams", _lossy(result.get("datagrams", {}))),
        ("relayed", _through_others(result.get("relayed", {}))),
        ("restarts", ", ".join(f"{name} {count}" for name, count in result.get("restarts", {}).items())),
        summary_line(result),
        ("logs", result["logs"] or on_hosts(result["job"])),
    ]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines if text)


def _ratio(before: int, after: int) -> str:
    return f"{before / after:.1f} x ({format_bytes(before)} encoded as {format_bytes(after)})" if after else ""


def _lossy(counted: Mapping[str, int]) -> str:
    """What became of the blocks sent as datagrams (--dgt 1); "" for none."""
    received, missing, late = (counted.get(name, 0) for name in ("received", "missing", "late"))
    total = received - late + missing
    if not total:
        return ""
    lost = f"{missing / total:.2%} missing when summed, {late / total:.2%} late"
    if withdrawn := counted.get("withdrawn", 0):
        lost += f", {withdrawn / total:.2%} sent with the next round"
    return f"{format_bytes(received)} of blocks received, {lost}"


def _through_others(counted: Mapping[str, int]) -> str:
    """What processes have sent through others of their level (--tsengine); "" for nothing."""
    if not counted.get("sent"):
        return ""
    return f"{format_bytes(counted['sent'])} through others, {counted.get('rerouted', 0)} contributions rerouted"


def _how_to_come_back(job: str) -> str:
    lines = [f"job {job} runs detached"]
    for command, what in (("attach", "follow it again"), ("status", "look"), ("logs", "read"), ("stop", "end it")):
        lines.append(f"  geomx {command:<6} {job}   {what}")
    return "\n".join(lines)
