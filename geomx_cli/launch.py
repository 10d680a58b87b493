"""Start a job, follow it to its end, and say how it went. A pure plan (plan.py) and what carries it out."""

import json as json_module
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from geomx_cli.errors import CheckFailed, DoneInPart, GeomxError, Interrupted, InvalidSettings, TrainingFailed
from geomx_cli.failure import Failure
from geomx_cli.fleet import Fleet, Inbox
from geomx_cli.follow import View, view_for
from geomx_cli.hosts import Host
from geomx_cli.hosts.local import LocalHost, python_path
from geomx_cli.inventory import Inventory
from geomx_cli.job import Job
from geomx_cli.plan import JobSpec, Plan, plan
from geomx_cli.progress import Progress, Totals
from geomx_cli.units import format_bytes, format_duration
from geomx_cli.watch import Outcome, Watch

__all__ = ["RESULT_VERSION", "launch"]

RESULT_VERSION = 1
# Bytes that a process takes at least.
_ANY_PROCESS, _BUNDLED_WORKER = 25 << 20, 140 << 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(inventory: Inventory, spec: JobSpec, *, json: bool) -> int:
    """Run the job `spec` on the machines of `inventory`; 0 when the training is done. Call it from the main
    thread.

    The result goes to stdout: a summary, or with `json` one object; everything else goes to stderr. Whatever
    happens, no process, key file or socket of the job is left on a host that can be reached; logs and event
    logs stay. Raises TrainingFailed, Interrupted (Ctrl-C, or SIGTERM or SIGHUP to this process), DoneInPart
    when servers did not end after the training or something could not be cleaned up, InvalidSettings,
    CheckFailed and HostUnreachable before the start.
    """
    began = time.monotonic()
    job = Job.of(spec)
    planned = plan(inventory, _complete(job, spec))
    _check_memory(planned)
    hosts = {name: _open(inventory, name) for name in planned.hosts}
    progress, view = Progress.of(planned, began), view_for()
    try:
        job.write_plan(planned)
        view.note(f"job {job.id}: {_count(planned)}; logs in {job.logs}")
        fleet = Fleet(job, hosts, job.assignments(planned, _working_dirs(inventory, planned)))
        outcome = _carry_out(job, planned, fleet, progress, view)
    finally:
        view.close()
        for host in hosts.values():
            host.close()
    error = _error(outcome, planned, job)
    _print_result(_result(job, outcome, error, progress.totals(), time.monotonic() - began), json=json)
    if error is not None:
        raise error
    return 0


def _carry_out(job: Job, planned: Plan, fleet: Fleet, progress: Progress, view: View) -> Outcome:
    problems: list[str] = []
    with _interrupts_to(fleet.inbox):
        try:
            fleet.start(job.key_files(planned))
            view.note(f"agents ready after {format_duration(time.monotonic() - progress.began)}")
            outcome = Watch(planned, fleet, progress, view).run()
        finally:
            problems += fleet.close()
            for problem in problems:
                view.note(f"warning: {problem}")
    outcome.problems += problems
    return outcome


@contextmanager
def _interrupts_to(inbox: Inbox) -> Iterator[None]:
    """Signals that would end us become messages: nothing is interrupted half-way."""

    def handle(number: int, frame: FrameType | None) -> None:
        inbox.put(("", {"type": "interrupt"}))  # SimpleQueue.put may be called from a signal handler

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _complete(job: Job, spec: JobSpec) -> JobSpec:
    path = spec.env.get("PYTHONPATH") or python_path()
    env = {**spec.env, "PYTHONPATH": path} if path else spec.env
    return replace(job.complete(spec), env=env)


def _open(inventory: Inventory, name: str) -> Host:
    host = inventory.host(name)
    if host.kind != "local":
        raise InvalidSettings(f"host {name} is of kind {host.kind}", "only hosts of kind local can be used")
    return LocalHost(name, host.python or sys.executable)


def _check_memory(planned: Plan) -> None:
    """Refuse what would only make this machine, which has all hosts of kind local, end processes at random."""
    import psutil

    bundled = [process for process in planned.processes if process.role == "worker" and not planned.spec.script]
    need = len(planned.processes) * _ANY_PROCESS + len(bundled) * (_BUNDLED_WORKER - _ANY_PROCESS)
    free = psutil.virtual_memory().available
    if need > free:
        raise CheckFailed(
            f"{len(planned.processes)} processes need at least {format_bytes(need)} of memory, and this machine "
            f"has {format_bytes(free)}",
            "take fewer parties, workers or servers",
        )


def _working_dirs(inventory: Inventory, planned: Plan) -> dict[str, str]:
    return {name: inventory.host(name).workdir or str(Path.cwd()) for name in planned.hosts}


def _count(planned: Plan) -> str:
    return f"{len(planned.processes)} processes on {len(planned.hosts)} hosts ({', '.join(planned.hosts)})"


def _error(outcome: Outcome, planned: Plan, job: Job) -> GeomxError | None:
    if outcome.interrupted:
        return Interrupted(f"job {job.id} was stopped", f"logs are in {job.logs}")
    if outcome.failure is not None:
        return _training_failed(outcome.failure, planned, job)
    if outcome.lingering:
        names = ", ".join(outcome.lingering)
        return DoneInPart(f"training is done, but {names} had to be stopped", f"logs are in {job.logs}")
    if outcome.problems:
        return DoneInPart(f"training is done, but: {'; '.join(outcome.problems)}", f"logs are in {job.logs}")
    return None


def _training_failed(failure: Failure, planned: Plan, job: Job) -> TrainingFailed:
    """The message that a person reads: who, where, why, the end of its log, and what to do."""
    if not failure.process:
        agent_log = job.host_directory(failure.host) / "agent.log"
        return TrainingFailed(
            f"the agent on host {failure.host} {failure.cause}", f"{failure.hint}; its log is {agent_log}"
        )
    process = planned.process(failure.process)
    who = f"{process.name} ({process.role.replace('_', ' ')} {process.rank} of party {process.party}"
    message = f"{who}, on host {failure.host}) failed first: it {failure.cause}"
    if failure.tail:
        message += "\n  the end of its log:\n" + "\n".join(f"    {line}" for line in failure.tail)
    log = job.logs / f"{process.file_name}.log"
    killed = failure.cause.startswith("was killed")
    usual = "find out who killed it (a person, or the system: dmesg)" if killed else "correct what the log shows"
    hint = failure.hint or f"{usual} and launch again"
    return TrainingFailed(message, f"{hint}; its log is {log}")


def _result(
    job: Job, outcome: Outcome, error: GeomxError | None, totals: Totals, total_s: float
) -> dict[str, Any]:
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
        "logs": str(job.logs),
        "failure": None if failure is None or outcome.interrupted else _failure_fields(failure),
    }


def _failure_fields(failure: Failure) -> dict[str, Any]:
    fields = failure.to_message()
    return {name: fields[name] for name in ("process", "host", "cause", "hint", "tail")}


def _print_result(result: Mapping[str, Any], *, json: bool) -> None:
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
        ("logs", result["logs"]),
    ]
    width = max(len(name) for name, _ in lines)
    print("\n".join(f"{name:<{width}}  {text}" for name, text in lines if text), flush=True)
