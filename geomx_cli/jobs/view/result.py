"""The result of a job: a JSON object, printed with `--json` and kept in state.json, and its text form."""

from collections.abc import Mapping
from typing import Any

from geomx_cli.core.errors import DoneInPart, GeomxError, Interrupted, TrainingFailed
from geomx_cli.core.units import format_bytes, format_duration
from geomx_cli.jobs.view.failure_report import failure_fields
from geomx_cli.jobs.view.log_paths import is_here, on_hosts
from geomx_cli.jobs.view.outcome import Outcome
from geomx_cli.jobs.view.outputs import model_of, summary_line
from geomx_cli.jobs.view.progress import Totals
from geomx_cli.plan import Plan

__all__ = ["RESULT_VERSION", "detached", "in_words", "result"]

RESULT_VERSION = 1
DETACHED = "detached"
_STATUS = {Interrupted: "interrupted", TrainingFailed: "failed", DoneInPart: "done in part"}


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
        ("WARNING", "; ".join(result.get("warnings", ()))),  # absent in results of an earlier version
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
