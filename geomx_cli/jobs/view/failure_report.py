"""Failure messages for users: process, host, cause, end of the log, and hint."""

from collections.abc import Mapping
from typing import Any

from geomx_cli.core.errors import TrainingFailed
from geomx_cli.core.root_cause import Failure
from geomx_cli.jobs.view.log_paths import host_suffix
from geomx_cli.plan import Plan

__all__ = ["explain", "failure_fields"]


def explain(failure: Failure, plan: Plan) -> TrainingFailed:
    """Return the error with its message and hint."""
    there, job_dir = host_suffix(failure.host, plan), plan.job_dirs[failure.host]
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
    """The end of the log, if it adds to the cause and the hint."""
    known = (failure.cause, failure.hint)
    said = [line.strip().removeprefix("error: ") for line in failure.tail]
    return [] if all(any(line in text for text in known) for line in said) else list(failure.tail)


def _usual(failure: Failure) -> str:
    """The default hint, for failures without a specific one."""
    if "out of memory" in failure.cause:
        return "put fewer workers on that host, or make batches smaller"
    if failure.cause.startswith("was killed"):
        return "find out who killed it (a user, or the system: dmesg) and launch again"
    if failure.cause.startswith("could not be started"):
        return "see that it is there on that host and may be executed, and launch again"
    if failure.cause.startswith("exited") and not failure.tail:
        return "its log is empty: run it by itself to see why it ends"
    return "correct what the log shows and launch again"


def failure_fields(failure: Failure) -> dict[str, Any]:
    """The failure's fields for JSON output."""
    fields: Mapping[str, object] = failure.to_message()
    return {name: fields[name] for name in ("process", "host", "cause", "hint", "tail")}
