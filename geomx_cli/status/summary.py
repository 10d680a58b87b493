"""How a job went, in words and as one JSON object: what launch and attach end with, and status explains."""

import json as json_module
from collections.abc import Mapping
from typing import Any

from geomx_cli.errors import DoneInPart, GeomxError, Interrupted, TrainingFailed
from geomx_cli.failure import Failure
from geomx_cli.job import Job
from geomx_cli.plan import Plan
from geomx_cli.status.outcome import Outcome
from geomx_cli.status.progress import Totals
from geomx_cli.units import format_bytes, format_duration

__all__ = [
    "RESULT_VERSION",
    "error_of",
    "explain",
    "failure_fields",
    "print_detached",
    "print_result",
    "result",
    "whereabouts",
]

RESULT_VERSION = 1


def error_of(outcome: Outcome, plan: Plan, job: Job) -> GeomxError | None:
    """What is to be raised for `outcome`; None when all is well."""
    where = whereabouts(job, plan)
    if outcome.interrupted:
        by = f" by {outcome.stopped_by}" if outcome.stopped_by else ""
        return Interrupted(f"job {job.id} was stopped{by}", where)
    if outcome.failure is not None:
        return explain(outcome.failure, plan, job)
    if outcome.lingering:
        names = ", ".join(outcome.lingering)
        return DoneInPart(f"training is done, but {names} had to be stopped", where)
    if outcome.problems:
        return DoneInPart(f"training is done, but: {'; '.join(outcome.problems)}", where)
    return None


def explain(failure: Failure, plan: Plan, job: Job) -> TrainingFailed:
    """The message that a person reads: who, where, why, the end of its log, and what to do."""
    there, job_dir = _there(failure.host, plan, job), plan.job_dirs[failure.host]
    if not failure.process:
        agent_log = f"{job_dir}/hosts/{failure.host}/agent.log"
        who = f"host {failure.host}" if failure.fault == "host" else f"the agent on host {failure.host}"
        message = f"{who} {failure.cause}\n  the agent's log is {agent_log}{there}"
        return TrainingFailed(message, failure.hint)
    process = plan.process(failure.process)
    who = f"{process.name} ({process.role.replace('_', ' ')} {process.rank} of party {process.party}"
    first = "" if failure.fault == "link" else "failed first: it "
    message = f"{who}, on host {failure.host}) {first}{failure.cause}"
    log = f"{job_dir}/logs/{process.file_name}.log{there}"
    if tail := _news(failure):
        message += f"\n  the end of its log, {log}:\n" + "\n".join(f"    {line}" for line in tail)
    else:
        message += f"\n  its log is {log}"
    return TrainingFailed(message, failure.hint or _usual(failure))


def _news(failure: Failure) -> list[str]:
    """The end of its log, if it says more than the cause and the hint."""
    told = (failure.cause, failure.hint)
    said = [line.strip().removeprefix("error: ") for line in failure.tail]
    return [] if all(any(line in text for text in told) for line in said) else list(failure.tail)


def _usual(failure: Failure) -> str:
    """What to do about a failure that nobody else knows better."""
    if failure.cause.startswith("was killed"):
        return "find out who killed it (a person, or the system: dmesg) and launch again"
    if failure.cause.startswith("could not be started"):
        return "see that it is there on that host and may be executed, and launch again"
    if failure.cause.startswith("exited") and not failure.tail:
        return "its log is empty: run it by itself to see why it ends"
    return "correct what the log shows and launch again"


def result(
    job: Job, plan: Plan, outcome: Outcome, error: GeomxError | None, totals: Totals, total_s: float
) -> dict[str, Any]:
    """The object that `--json` prints and state.json keeps. `total_s`: seconds from start to end. "logs" is null where
    logs lie on other machines.
    """
    failure = outcome.failure
    names = {Interrupted: "interrupted", TrainingFailed: "failed", DoneInPart: "done in part"}
    return {
        "schema_version": RESULT_VERSION,
        "job": job.id,
        "status": "done" if error is None else names[type(error)],
        "exit_code": 0 if error is None else error.exit_code,
        **totals.to_json(),
        "total_s": total_s,
        "directory": str(job.directory),
        "logs": str(job.logs) if _is_here(job, plan) else None,
        "failure": None if failure is None or outcome.interrupted else failure_fields(failure),
        "error": None if error is None else {"message": error.message, "hint": error.hint},
    }


def failure_fields(failure: Failure) -> dict[str, Any]:
    """A failure as JSON output has it."""
    fields = failure.to_message()
    return {name: fields[name] for name in ("process", "host", "cause", "hint", "tail")}


def print_result(result: Mapping[str, Any], *, json: bool) -> None:
    """Write the result to stdout: a summary, or with `json` one object."""
    if json:
        print(json_module.dumps(result), flush=True)
        return
    if result["status"] == "failed" and not result["rounds"]:
        return  # there is nothing to sum up
    lan, wan = result["bytes"]["lan"], result["bytes"]["wan"]
    accuracy, first = result["accuracy"], result["first_step_s"]
    known = result["training_s"] > 0  # a script need not tell
    lines = [
        ("status", result["status"]),
        ("test accuracy", "" if accuracy is None else f"{accuracy:.4f}"),
        ("rounds", str(result["rounds"] or "")),
        ("samples/s", f"{result['samples_per_s']:.0f}" if known else ""),
        ("first training step", "" if first is None else f"after {format_duration(first)}"),
        ("training time", format_duration(result["training_s"]) if known else ""),
        ("total time", format_duration(result["total_s"])),
        ("LAN sent / received", f"{format_bytes(lan[0])} / {format_bytes(lan[1])}"),
        ("WAN sent / received", f"{format_bytes(wan[0])} / {format_bytes(wan[1])}"),
        ("logs", result["logs"] or _on_hosts(result["job"])),
    ]
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in lines if text), flush=True)


def print_detached(job: Job, *, json: bool) -> None:
    """Write to stdout that the job goes on alone, and how to come back to it; with `json` one object."""
    if json:
        fields = {"job": job.id, "status": "detached", "exit_code": 0, "directory": str(job.directory)}
        print(json_module.dumps({"schema_version": RESULT_VERSION, **fields}), flush=True)
        return
    lines = [f"job {job.id} goes on alone"]
    for command, what in (("attach", "follow it again"), ("status", "look"), ("logs", "read"), ("stop", "end it")):
        lines.append(f"  geomx {command:<6} {job.id}   {what}")
    print("\n".join(lines), flush=True)


def _there(host: str, plan: Plan, job: Job) -> str:
    """Behind a path of a host: that it is of that host, when it may not be found here."""
    return "" if plan.job_dirs[host] == str(job.directory) else f" on host {host}"


def whereabouts(job: Job, plan: Plan) -> str:
    """Where the logs of a job are, in words."""
    return f"logs are in {job.logs}" if _is_here(job, plan) else f"logs lie {_on_hosts(job.id)}"


def _is_here(job: Job, plan: Plan) -> bool:
    return all(path == str(job.directory) for path in plan.job_dirs.values())


def _on_hosts(job: str) -> str:
    return f"on the hosts: geomx logs {job}, or geomx logs collect {job} --to DIR"
