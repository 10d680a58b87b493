"""The status of an agent: what agent/status.py writes and jobs/ reads. Standard library only."""

from typing import Any, TypedDict

from geomx_cli.core.root_cause import FailureFields

__all__ = ["MAX_METRICS", "AgentStatus", "ProcessStatus"]

MAX_METRICS = 64
"""Limits: metrics that a process may report; entries that the status keeps of any object in its events."""


class ProcessStatus(TypedDict):
    """One process; `newest`: its newest events by kind, unvalidated."""

    pid: int
    state: str
    status: int | None
    ended: float | None
    asked: bool
    newest: dict[str, dict[str, Any]]


class AgentStatus(TypedDict):
    """The whole status of an agent's part of the job. Times are JobClock's.

    uptime: seconds since boot.
    machine: the host's own name.
    agent: its pid, and its start time in kernel ticks.
    why: reason of the stop.
    asked: the user who requested the stop; "" if no user did.
    ordered: whether the control machine stopped the job for its own reasons.
    left: processes that could not be terminated.
    usage: see HostUsage; empty until measured, unvalidated.
    """

    schema_version: int
    job: str
    host: str
    time: float
    uptime: float
    boot: str
    machine: str
    agent: tuple[int, int]
    stage: str
    why: str
    asked: str
    ordered: bool
    left: list[str]
    processes: dict[str, ProcessStatus]
    failures: list[FailureFields]
    usage: dict[str, Any]
